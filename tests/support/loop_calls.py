"""How users call what they have transformed: with leaves that require grad, without gradients, twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["CALLS", "poisoned_buffer"]

Fn = Callable[..., Any]


def _with_leaves(fn: Fn, mode: Any = nullcontext) -> Fn:
    """All floating arguments require grad."""

    def call(*xs: torch.Tensor) -> Any:
        leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in xs]
        with mode():
            return fn(*leaves)

    return call


def _first_leaf(fn: Fn) -> Fn:
    return lambda x, *rest: fn(x.clone().requires_grad_(), *rest)


def _in_inference_mode(fn: Fn) -> Fn:
    def call(*xs: torch.Tensor) -> Any:
        with torch.inference_mode():
            return fn(*(x.clone() for x in xs))

    return call


def _twice(fn: Fn) -> Fn:
    """The same arguments again."""
    return lambda *xs: (fn(*xs), fn(*xs))[1]


CALLS: dict[str, Callable[[Fn], Fn]] = {
    "plain": lambda fn: fn,
    "leaves": _with_leaves,
    "one leaf": _first_leaf,
    "leaves without gradients": lambda fn: _with_leaves(fn, torch.no_grad),
    "inference mode": _in_inference_mode,
    "twice with leaves": lambda fn: _twice(_with_leaves(fn)),
}


def poisoned_buffer(value: torch.Tensor, count: int) -> torch.Tensor:
    """What `collecting.new_buffer` gives, filled with what no result has."""
    buffer = value.new_empty((count, *value.shape))
    worst = float("nan") if value.is_floating_point() or value.is_complex() else 99
    return buffer.fill_(True if value.dtype == torch.bool else worst)


