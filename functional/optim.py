"""Optimisers as pairs of pure functions on pytrees.

    optimizer = adamw(1e-3)
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params)

`update` returns the new parameters, not increments, and changes no argument. The state is a plain
tuple of trees shaped like the parameters and a 0-d step counter, so that it shards like the
parameters and a later step is traced no differently from the first. The arithmetic is
`torch.optim`'s, in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchard.functional import tree

__all__ = ["AdamState", "Optimizer", "Rate", "SgdState", "adamw", "sgd", "warmup_cosine"]

Rate = float | Tensor | Callable[[Tensor], Tensor | float]
"""A learning rate: a number, a 0-d tensor, or a function of the 0-d count of steps taken so far."""


class Optimizer(NamedTuple):
    """What an optimiser is.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (new params, new state)``; the three trees of
            tensors have one structure, else ValueError.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


class SgdState(NamedTuple):
    """step: 0-d int64; momentum: a tree like the parameters, or None without momentum."""

    step: Tensor
    momentum: Any


class AdamState(NamedTuple):
    """step: 0-d int64; mean and square: running moments, trees like the parameters."""

    step: Tensor
    mean: Any
    square: Any


def _first_step(params: Any) -> Tensor:
    devices = [p.device for p in tree.leaves(params) if p is not None]
    return torch.zeros((), dtype=torch.int64, device=devices[0] if devices else None)


def _rate_at(lr: Rate, step: Tensor) -> float | Tensor:
    return lr(step) if callable(lr) else lr


def _each(count: int, fn: Callable[..., tuple[Any, ...]], *trees: Any) -> tuple[Any, ...]:
    """Map a function with `count` results to as many trees; a None, for no parameter, stays."""
    shape = tree.structure(trees[0])
    mapped = tree.map(lambda p, *rest: (None,) * count if p is None else fn(p, *rest), *trees)
    rows = shape.flatten_up_to(mapped)
    return tuple(tree.unflatten(shape, [row[i] for row in rows]) for i in range(count))


def _stepped(p: Tensor, change: Tensor) -> Tensor:
    """p - change in p's dtype: 0-d parameters would take the dtype of a 0-d learning rate."""
    return (p - change).to(p.dtype)


def _zeros_like(params: Any) -> Any:
    return tree.map(lambda p: None if p is None else torch.zeros_like(p), params)


def sgd(
    lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in torch's form).

    ValueError for Nesterov's momentum without momentum. State: SgdState.
    """
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs momentum > 0")

    def init(params: Any) -> SgdState:
        return SgdState(_first_step(params), _zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        rate = _rate_at(lr, state.step)

        def plain(p: Tensor, g: Tensor) -> tuple[Tensor]:
            return (_stepped(p, rate * decayed(p, g)),)

        def heavy(p: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            g = decayed(p, g)
            v = momentum * v + g
            return _stepped(p, rate * (g + momentum * v if nesterov else v)), v

        if momentum:
            params, velocity = _each(2, heavy, params, grads, state.momentum)
        else:
            (params,), velocity = _each(1, plain, params, grads), None
        return params, SgdState(state.step + 1, velocity)

    def decayed(p: Tensor, g: Tensor) -> Tensor:
        return g + weight_decay * p if weight_decay else g

    return Optimizer(init, update)


def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Adam (Kingma, Ba, arXiv:1412.6980) with decoupled decay (Loshchilov, Hutter, 1711.05101).

    State: AdamState. With weight_decay 0 it is Adam.
    """

    def init(params: Any) -> AdamState:
        return AdamState(_first_step(params), _zeros_like(params), _zeros_like(params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = _rate_at(lr, state.step)
        step = state.step + 1
        # float64 on the side: 1 - 0.999^step loses half its digits in float32.
        count = step.to(torch.float64)
        correction1, correction2 = 1 - b1**count, 1 - b2**count
        shift = rate / correction1

        def one(p: Tensor, g: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            m = m + (1 - b1) * (g - m)
            s = b2 * s + (1 - b2) * g * g
            root = s.sqrt() / correction2.sqrt() + eps
            kept = (p * (1 - rate * weight_decay)).to(p.dtype)
            return _stepped(kept, shift * (m / root)), m, s

        params, mean, square = _each(3, one, params, grads, state.mean, state.square)
        return params, AdamState(step, mean, square)

    return Optimizer(init, update)


def warmup_cosine(
    peak: float, steps: int, warmup: int = 0, floor: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """A schedule: `warmup` steps in a line up to `peak`, then half a cosine down to `floor`.

    Loshchilov, Hutter, arXiv:1608.03983, without restarts. From step `steps` on it stays at floor.
    """

    def rate(step: Tensor) -> Tensor:
        done = ((step - warmup) / max(steps - warmup, 1)).clamp(0, 1)
        cosine = floor + (peak - floor) * 0.5 * (1 + torch.cos(torch.pi * done))
        return torch.where(step < warmup, peak * (step + 1) / max(warmup, 1), cosine)

    return rate
