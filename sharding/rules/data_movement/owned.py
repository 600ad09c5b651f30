"""Indices of rows of which a rank owns a run: masks of its rows, and places for all others."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Local

__all__ = ["from_the_end", "masked", "owned", "sent_away", "spare_slot"]


def owned(local: Local, ids: Any, own: range, size: int, *, refuse: bool) -> tuple[Any, Any]:
    """A mask of the ids in the owned run, and the ids relative to its start (0 where masked out).

    With ``refuse``, ids out of bounds belong to the first or last shard, whose kernel refuses them as it
    would on the whole table. Without it they belong to no shard, as the forward has refused them.
    """
    checks = []
    if own.start > 0 or not refuse:
        checks.append(local.call(aten.ge.Scalar, ids, own.start))
    if own.stop < size or not refuse:
        checks.append(local.call(aten.lt.Scalar, ids, own.stop))
    mask = checks[0] if len(checks) == 1 else local.call(aten.logical_and.default, *checks)
    shifted = local.call(aten.sub.Tensor, ids, own.start)
    return mask, local.call(aten.where.ScalarOther, mask, shifted, 0)


def from_the_end(local: Local, ids: Any, size: int) -> Any:
    """The ids, with negative ones counted from the end."""
    negative = local.call(aten.lt.Scalar, ids, 0)
    return local.call(aten.where.self, negative, local.call(aten.add.Tensor, ids, size), ids)


def masked(local: Local, mask: Any, value: Any, end: int, rank: int) -> Any:
    """``value``, of ``rank`` dims, where the mask is set, else zero; the mask's dims end at ``end``."""
    for _ in range(rank - end):
        mask = local.call(aten.unsqueeze.default, mask, -1)
    return local.call(aten.where.ScalarOther, mask, value, False)  # False adds nothing in any dtype


def sent_away(local: Local, ids: Any, own: range, size: int) -> Any:
    """The ids relative to the owned run; ids of other rows point at the spare slot after it."""
    mask, shifted = owned(local, ids, own, size, refuse=False)
    others = local.call(aten.logical_not.default, mask)
    return local.call(aten.masked_fill.Scalar, shifted, others, len(own))


def spare_slot(local: Local, table: Any, shape: list[int], dim: int) -> Any:
    """The table with a spare slot at the end of ``dim``, for writes that are to be discarded."""
    shape = list(shape)
    shape[dim] = 1
    spare = local.call(aten.new_zeros.default, table, shape)
    return local.call(aten.cat.default, [table, spare], dim)
