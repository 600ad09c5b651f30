"""Optimizers as pairs of pure functions on pytrees.

    optimizer = adamw(1e-3)
    state = optimizer.init(params)
    params, state = optimizer.update(grads, state, params)

`update` returns the new parameters, not increments, and changes no argument. The state is a plain tuple
of a 0-d step counter and trees shaped like the parameters, so that it shards like the parameters and all
steps share one trace. The arithmetic is `torch.optim`'s, in the same order (updates/arithmetic.py). What
runs is a kernel of torch's that updates many parameters (updates/).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.tracing.signature import ShapeDtype
from torchard.functional.updates.arithmetic import adam_corrections, adamw_step, sgd_step

__all__ = ["AdamState", "Optimizer", "Rate", "SgdState", "adamw", "sgd", "warmup_cosine"]

Rate = float | Tensor | Callable[[Tensor], Tensor | float]
"""A learning rate: a number, a 0-d tensor, or a schedule, a function of the number of steps taken.

A schedule is called with a 0-d float64 tensor (exact up to 2^53) and returns a number or a 0-d
tensor. A schedule that reads a table does so by ``table[count.long()]``.

>>> import torch
>>> from torchard import optim
>>> def halving(count: torch.Tensor) -> torch.Tensor:
...     return 0.5**count
>>> rate: optim.Rate = halving
>>> optimizer = optim.sgd(rate)
>>> params = {"w": torch.tensor(0.0)}
>>> state = optimizer.init(params)
>>> for _ in range(3):
...     params, state = optimizer.update({"w": torch.tensor(1.0)}, state, params)
>>> params["w"]                                                      # -(1 + 1/2 + 1/4)
tensor(-1.7500)
"""


class Optimizer(NamedTuple):
    """An optimizer: a pair of pure functions on pytrees.

    Attributes:
        init: ``init(params) -> state``. Of this module's optimizers it also takes `ShapeDtype` leaves,
            and returns the state as `ShapeDtype` leaves, to ``lower`` a training step without memory.
        update: ``update(grads, state, params) -> (new params, new state)``. The three trees have one
            structure, else ValueError. No argument is changed.

    >>> import torch
    >>> from torchard import optim
    >>> def sign_descent(rate: float) -> optim.Optimizer:
    ...     def update(grads, state, params):
    ...         return {k: p - rate * grads[k].sign() for k, p in params.items()}, state
    ...     return optim.Optimizer(lambda params: None, update)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> sign_descent(0.25).update({"w": torch.tensor([3.0, -3.0])}, None, params)
    ({'w': tensor([0.7500, 1.2500])}, None)
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


class SgdState(NamedTuple):
    """The state of `sgd`.

    Attributes:
        step: the number of updates made, 0-d int64.
        momentum: the velocity, a tree like the parameters; None without momentum.

    >>> import torch
    >>> from torchard import optim
    >>> optim.sgd(0.1, momentum=0.9).init({"w": torch.ones(2)})
    SgdState(step=tensor(0), momentum={'w': tensor([0., 0.])})
    """

    step: Tensor
    momentum: Any


class AdamState(NamedTuple):
    """The state of `adamw`.

    Attributes:
        step: the number of updates made, 0-d int64.
        mean: the running mean of the gradients, a tree like the parameters.
        square: the running mean of their squares, a tree like the parameters.

    >>> import torch
    >>> from torchard import optim
    >>> optim.adamw(1e-3).init({"w": torch.ones(2)})
    AdamState(step=tensor(0), mean={'w': tensor([0., 0.])}, square={'w': tensor([0., 0.])})
    """

    step: Tensor
    mean: Any
    square: Any


def _first_step(params: Any) -> Any:
    """The counter of steps, on the parameters' device; of parameters without data, one without data."""
    leaves = [p for p in tree.leaves(params) if p is not None]
    if any(isinstance(p, ShapeDtype) for p in leaves):
        return ShapeDtype((), torch.int64, leaves[0].device)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _rate_at(lr: Rate, step: Tensor) -> float | Tensor:
    return lr(step.to(torch.float64)) if callable(lr) else lr


def _is_number(value: Any, bound: float) -> bool:
    """Whether a value is a 0-d tensor or a number in [0, bound). `True` is not taken for 1."""
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < bound


def _check_rate(who: str, lr: Any) -> None:
    if not (_is_number(lr, math.inf) or callable(lr)):
        raise ValueError(
            f"{who}(lr={lr!r}): a learning rate is a number >= 0, a 0-d tensor, or a function of the "
            "count of steps (see torchard.optim.Rate)."
        )


def _check_numbers(who: str, **numbers: tuple[Any, float]) -> None:
    """Check that 0 <= value < bound for each (value, bound)."""
    for key, (value, bound) in numbers.items():
        if isinstance(value, Tensor) or not _is_number(value, bound):
            above = "a number >= 0" if bound == math.inf else f"a number in [0, {bound:g})"
            raise ValueError(f"{who}({key}={value!r}): {key} must be {above}.")


def _decay_of(who: str, weight_decay: Any) -> Callable[..., Any]:
    """A function from the parameters to the tree of their weight decays, or of functions of these."""
    for leaf in tree.leaves(weight_decay):
        if not _is_number(leaf, math.inf):
            raise ValueError(
                f"{who}(weight_decay=...) has a leaf {leaf!r}: give one number >= 0 (or 0-d tensor) "
                "for all parameters, or a tree of them that is a prefix of the parameters, as in "
                "weight_decay={'w': 0.1, 'b': 0.0}."
            )

    def decays(params: Any, of: Callable[[Any], Any] = lambda decay: decay) -> Any:
        spread = tree.broadcast(tree.map(of, weight_decay), params, "weight_decay", "the parameters")
        return tree.unflatten(tree.structure(params), spread)

    return decays


@dataclass(frozen=True)
class _Results:
    """The results of one leaf: a leaf itself, unlike a tuple."""

    row: tuple[Any, ...]


def _map_to_trees(count: int, fn: Callable[..., tuple[Any, ...]], *trees: Any) -> tuple[Any, ...]:
    """Map a function with `count` results over trees to `count` trees; None in the first gives None."""
    shape, none = tree.structure(trees[0]), (None,) * count
    mapped = tree.map(lambda p, *rest: _Results(none if p is None else fn(p, *rest)), *trees)
    rows: list[Any] = [results.row for results in shape.flatten_up_to(mapped)]
    return tuple(tree.unflatten(shape, [row[i] for row in rows]) for i in range(count))


def _zeros_like(params: Any) -> Any:
    """Zeros for each parameter; one without data stands for its own zeros."""
    return tree.map(
        lambda p: p if p is None or isinstance(p, ShapeDtype) else torch.zeros_like(p), params
    )


@checked
def sgd(
    lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: Any = 0.0
) -> Optimizer:
    """Stochastic gradient descent, with momentum in the form of `torch.optim.SGD`.

    Args:
        lr: the learning rate, >= 0; see `Rate` for schedules.
        momentum: the factor of the velocity, >= 0; with 0 there is no velocity in the state.
        nesterov: whether to use Nesterov's momentum.
        weight_decay: the multiple of the parameters that is added to the gradients, >= 0, or a tree of
            such numbers that is a prefix of the parameters: ``{"w": 0.1, "b": 0.0}``.

    Returns:
        An `Optimizer`, whose state is an `SgdState`.

    Raises:
        ValueError: a number is out of its range, or ``nesterov`` is given without momentum.

    Source: Sutskever et al., ICML 2013, section 2.

    >>> import torch
    >>> from torchard import optim
    >>> optimizer = optim.sgd(0.5, momentum=1.0)
    >>> params = {"w": torch.tensor([8.0])}
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     params, state = optimizer.update({"w": torch.tensor([2.0])}, state, params)
    >>> params, state.momentum
    ({'w': tensor([5.])}, {'w': tensor([4.])})
    """
    _check_rate("sgd", lr)
    _check_numbers("sgd", momentum=(momentum, math.inf))
    decays = _decay_of("sgd", weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs momentum > 0")

    def init(params: Any) -> SgdState:
        return SgdState(_first_step(params), _zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        rate = _rate_at(lr, state.step)

        def step_leaf(p: Tensor, g: Tensor, decay: Any, v: Tensor | None = None) -> tuple[Tensor, ...]:
            return sgd_step(p, v, g, rate, decay, momentum, nesterov)

        if momentum:
            params, velocity = _map_to_trees(2, step_leaf, params, grads, decays(params), state.momentum)
        else:
            (params,), velocity = _map_to_trees(1, step_leaf, params, grads, decays(params)), None
        return params, SgdState(state.step + 1, velocity)

    return Optimizer(init, update)


@checked
def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Any = 1e-2,
) -> Optimizer:
    """Adam with decoupled weight decay; plain Adam with ``weight_decay=0``.

    Args:
        lr: the learning rate, >= 0; see `Rate` for schedules.
        b1: the decay of the running mean of gradients, in [0, 1).
        b2: the decay of the running mean of squared gradients, in [0, 1).
        eps: added to the square root of the second moment, >= 0.
        weight_decay: a number >= 0, or a tree of such numbers that is a prefix of the parameters:
            ``{k: 0.1 if p.ndim > 1 else 0.0 for k, p in params.items()}``. Each step multiplies the
            parameters by ``1 - lr * weight_decay``.

    Returns:
        An `Optimizer`, whose state is an `AdamState`.

    Raises:
        ValueError: a number is out of its range.

    Source: Kingma, Ba, arXiv:1412.6980, algorithm 1; Loshchilov, Hutter, arXiv:1711.05101, algorithm 2.

    >>> import torch
    >>> from torchard import optim
    >>> optimizer = optim.adamw(0.5, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.update({"w": torch.tensor([3.0, -0.1])}, state, params)
    >>> params["w"]                       # the first step has length lr, whatever the gradient's scale
    tensor([0.5000, 2.5000])
    """
    _check_rate("adamw", lr)
    _check_numbers("adamw", b1=(b1, 1), b2=(b2, 1), eps=(eps, math.inf))
    decays = _decay_of("adamw", weight_decay)

    def init(params: Any) -> AdamState:
        return AdamState(_first_step(params), _zeros_like(params), _zeros_like(params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = _rate_at(lr, state.step)
        step = state.step + 1
        corrections = adam_corrections(step.to(torch.float64), rate, b1, b2)

        def step_leaf(
            p: Tensor, g: Tensor, factor: Any, m: Tensor, s: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            return adamw_step(p, m, s, g, corrections, factor, b1, b2, eps)

        factors = decays(params, lambda decay: 1 - rate * decay)
        params, mean, square = _map_to_trees(
            3, step_leaf, params, grads, factors, state.mean, state.square
        )
        return params, AdamState(step, mean, square)

    return Optimizer(init, update)


@checked
def warmup_cosine(
    peak: float, steps: float, warmup: float = 0, floor: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """A learning rate schedule: linear warmup, then half a cosine down to a floor.

    Args:
        peak: the largest rate, reached at the end of the warmup, >= 0.
        steps: the number of steps after which the rate stays at ``floor``, the warmup included.
        warmup: the number of warmup steps; the first one has the rate ``peak / warmup``.
        floor: the last rate, >= 0.

    Returns:
        A function from the number of steps taken (0-d float64) to the rate (0-d float64); see `Rate`.

    Source: Loshchilov, Hutter, arXiv:1608.03983, eq. 5, without restarts.

    >>> import torch
    >>> from torchard import optim
    >>> rate = optim.warmup_cosine(1.0, steps=8, warmup=4)
    >>> [rate(torch.tensor(count)).item() for count in (0, 1, 4, 6, 8, 100)]
    [0.25, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    numbers = {"peak": (peak, math.inf), "steps": (steps, math.inf), "floor": (floor, math.inf)}
    _check_numbers("warmup_cosine", **numbers, warmup=(warmup, math.inf))

    def rate(step: Tensor) -> Tensor:
        step = step.to(torch.float64)
        done = ((step - warmup) / max(steps - warmup, 1)).clamp(0, 1)
        cosine = floor + (peak - floor) * 0.5 * (1 + torch.cos(torch.pi * done))
        return torch.where(step < warmup, peak * (step + 1) / max(warmup, 1), cosine)

    return rate
