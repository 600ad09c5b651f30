"""``x[i]`` with an index that is a tensor without dims: torch reads its value, and selects a view.

A trace has no value of it: it records a lookup, whose result is a copy of what the view shows. So that
nobody can tell them apart, purifying checks that neither is read after the other was written to
(``effects/picked_memory.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.effects.picked_memory import Picked
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["assigns_picked", "pick", "picks"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def picks(func: Any, args: Any) -> bool:
    """Whether a call of torch indexes a tensor by the value of another one."""
    if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
        return False
    return any(map(_is_number, _items(args[1])))


def pick(state: TraceState, x: torch.Tensor, index: Any) -> torch.Tensor:
    """``x[index]``."""
    at, rest = _parts(x, index)
    row: torch.Tensor = aten.index.Tensor(x, at)
    node, source = (internals.proxy_node(state.tracer, internals.base_tensor(t)) for t in (row, x))
    if node is not None and source is not None:
        state.picked.append(Picked(node, source))
    return row[rest] if rest else row


def assigns_picked(state: TraceState, x: torch.Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``."""
    at, rest = _parts(x, index)
    if rest:
        row = aten.index.Tensor(x, at)
        row[rest] = value
        value = row
    elif not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    aten.index_put_.default(x, at, _fit(value.to(x.dtype), x.ndim - sum(i is not None for i in at)))


def _fit(value: torch.Tensor, ndim: int) -> torch.Tensor:
    """A value without the dims of size 1 in front that an assignment allows."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value[0]
    return value


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_number(item: Any) -> bool:
    """Whether an item of an index is a tensor that torch reads as a number, which the trace has not."""
    if not isinstance(item, torch.Tensor) or item.ndim or item.dtype not in _INTEGERS:
        return False
    return getattr(internals.base_tensor(item), "constant", None) is None


def _parts(x: torch.Tensor, index: Any) -> tuple[list[torch.Tensor | None], tuple[Any, ...]]:
    """The numbers, each at its dim of x, and the index of what they leave."""
    items = _items(index)
    at: list[torch.Tensor | None] = []
    rest = []
    for item in items:
        if item is Ellipsis:
            at += [None] * (x.ndim - sum(map(_taken, items)))
        elif _is_number(item):
            at.append(item)
            continue
        else:
            at += [None] * _taken(item)
        rest.append(item)
    while rest and _is_all(rest[-1]):
        rest.pop()
    return at, tuple(rest)


def _is_all(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def _taken(item: Any) -> int:
    """How many dims an item of an index is for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    masks = (torch.bool, torch.uint8)
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype in masks else 1
