"""Operations that compute each row by itself: what their factor rules say of a dim of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.rules import Call

__all__ = ["NotRows", "dim_of_rows", "factor_of_rows"]


class NotRows(Exception):
    """An operation does not compute each row by itself."""


def factor_of_rows(call: Call, rule: Rule, dims: Mapping[Any, Any]) -> int:
    """The factor of the rows of operands.

    Args:
        dims: the dim of rows of each operand that has rows.

    Raises:
        NotRows: operands do not share one that can be split in any way.
    """
    pairs = zip(call.operands, rule.ins, strict=True)
    factors = {of_dims[dims[operand]] for operand, of_dims in pairs if operand in dims}
    if rule.gathered or len(factors) != 1 or len(next(iter(factors))) != 1:
        raise NotRows
    factor: int = next(iter(factors))[0]
    if factor in rule.whole | rule.run | rule.index:
        raise NotRows
    return factor


def dim_of_rows(dims: tuple[tuple[int, ...], ...], factor: int) -> int | None:
    """The dim of rows of a result; None if it has none.

    Raises:
        NotRows: they are part of a dim.
    """
    on = [i for i, dim in enumerate(dims) if factor in dim]
    if not on:
        return None
    if len(on) > 1 or dims[on[0]] != (factor,):
        raise NotRows
    return on[0]
