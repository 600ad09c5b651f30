"""Normal forms of lookups: contiguous rows of values, indexed along the last dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.kernels.terms.registry import EvaluatedCall, register
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import TermValue

__all__: list[str] = []


@register(aten.gather.default)
def _gather(store: Store, call: EvaluatedCall) -> Any:
    """Gather [*rows, n] by indices [*rows, k], for any dim n and any number of row dims."""
    return _by_rows(store, call, "gather", call.args[0], call.args[1], [call.args[2]])


@register(aten.scatter_add.default)
def _scatter_add(store: Store, call: EvaluatedCall) -> Any:
    """Add [*rows, k] to [*rows, n] at indices [*rows, k]."""
    return _by_rows(store, call, "scatter_add", call.args[0], call.args[1], call.args[2:4])


def _by_rows(
    store: Store, call: EvaluatedCall, op: str, x: TermValue, dim: int, more: Sequence[TermValue]
) -> Any:
    if not x.shape:
        return NotImplemented
    dim %= len(x.shape)
    order = [d for d in range(len(x.shape)) if d != dim] + [dim]
    operands = [_rows(value, order) for value in (x, *more)]
    rows = [value for value in operands if value is not None]
    if len(rows) < len(operands) or len({value.shape[0] for value in rows}) > 1:
        return NotImplemented
    turned = [call.shape[d] for d in order]
    shape = [math.prod(turned[:-1]), turned[-1]]
    rowwise = store.opaque(op, rows, (), shape, call.dtype)
    access = rowwise.access.reshaped(turned)
    assert access is not None  # it is contiguous
    back = sorted(range(len(order)), key=order.__getitem__)
    return TermValue(rowwise.term, access.permuted(back))


def _rows(value: TermValue, order: Sequence[int]) -> TermValue | None:
    """A value as two dims, its rows and the last dim; None if its strides do not allow it."""
    turned = value.access.permuted(order)
    access = turned.reshaped([math.prod(turned.shape[:-1]), turned.shape[-1]])
    return None if access is None else TermValue(value.term, access)
