"""Bags of a table's rows: sums, means and maxima.

torch's kernel can be split by the table's columns, its gradient by rows too, and both by bags if all of
them have one size. Other splits decompose it (``decompositions/bags.py``), for which maxima need two
operations of our own: the largest of a bag's rows, and the first place among the ids with a row as
large. The results of ranks combine by max and by min, so that no rows are sent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.data_movement.counting import counted, local_count
from torchard.sharding.rules.data_movement.owned import owned, sent_away
from torchard.sharding.rules.registry import Call, Local, register_rule

__all__ = ["FIRST", "LARGEST", "first_of_bags", "largest_of_bags"]

Apply = Callable[..., Any]


# -- torch's kernel -------------------------------------------------------------------------------


def _size_of_bags(call: Call, offsets: int) -> int | None:
    """The size of every bag, if the offsets (an operand) count in steps of it; ids come before them."""
    (n,), (bags,) = call.ins[offsets - 1], call.ins[offsets]
    size, rest = divmod(n, bags) if bags > 1 else (0, 0)
    return size if size and not rest and counted(call.operands[offsets], size) == 0 else None


def _dims_of_ids(call: Call, offsets: int, bags: int) -> tuple[str, str, str]:
    """The dims of ids and offsets, and the clauses for them."""
    if call.ins[offsets] == (bags,) and _size_of_bags(call, offsets) is not None:
        return "(b l)", "b", " | whole l | run b"
    return "n", "m", " | whole n m b"


def _per_bag(shape: tuple[int, ...], bags: int, name: str) -> str:
    """The dims of a number, or of one for every column, for each bag; kernels return some of these."""
    return "b d" if len(shape) == 2 else "b" if shape == (bags,) else name


def _bags(call: Call) -> str:
    bags = call.outs[0][0]
    ids, offsets, clauses = _dims_of_ids(call, 2, bags)
    ins = ["v d", ids, offsets, *[ids] * (len(call.ins) - 3)]
    outs = ["b d", ids if call.outs[1][0] else "e0"]
    outs += [_per_bag(shape, bags, f"e{i}") for i, shape in enumerate(call.outs[2:], 1)]
    return f"{', '.join(ins)} -> {', '.join(outs)}{clauses} | whole v | same d b"


def _emit_bags(call: Call, local: Local) -> Any:
    """The kernel; where bags are split, the numbers that it gives them count from the rank's first."""
    if not local.result_axes(0):
        return local.call(call.target, *local.args, **local.kwargs)
    table, ids, _, *rest = local.args
    several = local.call(call.target, table, ids, _count(call, local), *rest, **local.kwargs)
    out, numbers, *others = [local.call(operator.getitem, several, i) for i in range(4)]
    if call.outs[1][0]:
        numbers = local.call(aten.add.Tensor, numbers, local.result_range(0).start)
    return (out, numbers, *others)


def _count(call: Call, local: Local) -> Any:
    """The offsets of a rank's bags, which have one size."""
    return local_count(call, local, 2, 0, call.ins[1][0] // call.ins[2][0])


register_rule(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    text=_bags,
    emit=_emit_bags,
)


def _bags_backward(call: Call) -> str | None:
    if call.arg(7) or call.arg(9):  # scaled by frequencies in the batch, or sparse
        return None
    bags = call.ins[0][0]
    ids, offsets, clauses = _dims_of_ids(call, 2, bags)
    saved = [_per_bag(shape, bags, f"e{i}") for i, shape in enumerate(call.ins[4:6])]
    ins = ["b d", ids, offsets, _numbers(call, 3, ids), *saved, *[ids] * (len(call.ins) - 6)]
    return f"{', '.join(ins)} -> v d{clauses} | index v | run v | linear 0"


def _numbers(call: Call, operand: int, ids: str) -> str:
    """The dims of the numbers of bags, which some kernels do not save."""
    return ids if call.ins[operand][0] else "e"


def _emit_bags_backward(call: Call, local: Local) -> Any:
    """Ids of other ranks' rows become those of one row after the rank's own, which is dropped."""
    grad, ids, offsets, numbers, sizes, places, rows, *rest = local.args
    offsets, numbers = _of_own_bags(call, local, offsets, numbers, 3)
    own = local.result_range(0)
    if len(own) == rows:
        saved = (numbers, sizes, places)
        return local.call(call.target, grad, ids, offsets, *saved, rows, *rest)
    padding = call.arg(11, "padding_idx", -1)
    if padding >= 0:
        ids = local.call(aten.masked_fill.Scalar, ids, local.call(aten.eq.Scalar, ids, padding), -1)
    ids = sent_away(local, ids, own, rows)
    if len(call.ins[5]) == 2:
        places = sent_away(local, places, own, rows)
    size = len(own)
    saved, padding = (numbers, sizes, places), size if padding >= 0 else -1
    out = local.call(
        call.target, grad, ids, offsets, *saved, size + 1, *rest[:4], padding
    )
    return local.call(aten.slice.Tensor, out, 0, 0, size)


def _of_own_bags(
    call: Call, local: Local, offsets: Any, numbers: Any, operand: int
) -> tuple[Any, Any]:
    """The offsets and numbers of bags (an operand), counted from a rank's first bag."""
    if not local.operand_axes(0, 0):
        return offsets, numbers
    if call.ins[operand][0]:
        first = local.operand_range(0, 0).start
        numbers = local.call(aten.sub.Tensor, numbers, first)
    return _count(call, local), numbers


register_rule(
    aten._embedding_bag_backward.default, text=_bags_backward, emit=_emit_bags_backward
)


def _weights_backward(call: Call) -> str:
    """The gradient of each id's weight, a product of rows: operands are gradient, table, ids, offsets."""
    ids, offsets, clauses = _dims_of_ids(call, 3, call.ins[0][0])
    ins = ["b d", "v d", ids, offsets, _numbers(call, 4, ids)]
    return f"{', '.join(ins)} -> {ids}{clauses} | whole v | linear 0 | linear 1"


def _emit_weights_backward(call: Call, local: Local) -> Any:
    grad, table, ids, offsets, numbers, *rest = local.args
    if local.operand_axes(0, 0):
        size = call.ins[2][0] // call.ins[3][0]
        offsets = local_count(call, local, 3, 0, size)
        if call.ins[4][0]:
            numbers = local.call(aten.sub.Tensor, numbers, local.operand_range(0, 0).start)
    return local.call(call.target, grad, table, ids, offsets, numbers, *rest)


register_rule(
    aten._embedding_bag_per_sample_weights_backward.default,
    text=_weights_backward,
    emit=_emit_weights_backward,
)


# -- the largest of each bag's rows -----------------------------------------------------------------


def _per_column(do: Apply, x: Any, columns: int) -> Any:
    """A number of each id, for every column."""
    return do(aten.expand.default, do(aten.unsqueeze.default, x, 1), [-1, columns])


def _largest(do: Apply, w: Any, ids: Any, counts: Any, bag: Any, shape: list[int], like: Any) -> Any:
    rows = do(aten.embedding.default, w, ids)
    rows = do(aten.where.ScalarOther, do(aten.unsqueeze.default, counts, 1), rows, -math.inf)
    none = do(aten.full.default, shape, -math.inf, dtype=like.dtype, device=like.device)
    return do(aten.scatter_reduce.two, none, 0, _per_column(do, bag, shape[1]), rows, "amax")


def _first(do: Apply, w: Any, ids: Any, counts: Any, bag: Any, best: Any, shape: list[int],
           places: range, after: int) -> Any:  # fmt: skip
    """The places of a rank's ids are ``places``; one after the last means that no row is as large."""
    rows = do(aten.embedding.default, w, ids)
    hit = do(aten.eq.Tensor, rows, do(aten.index_select.default, best, 0, bag))
    hit = do(aten.logical_and.default, hit, do(aten.unsqueeze.default, counts, 1))
    each = do(aten.new_full.default, bag, [len(places)], 1)
    at = do(aten.add.Tensor, do(aten.cumsum.default, each, 0), places.start - 1)
    at = do(aten.where.ScalarOther, hit, do(aten.unsqueeze.default, at, 1), after)
    none = do(aten.new_full.default, bag, shape, after)
    return do(aten.scatter_reduce.two, none, 0, _per_column(do, bag, shape[1]), at, "amin")


def _eagerly(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _largest_of_bags(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, bags: int
) -> torch.Tensor:
    shape = [bags, w.shape[1]]
    largest: torch.Tensor = _largest(_eagerly, w, ids, counts, bag, shape, w)
    return largest


def _first_of_bags(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    n, shape = len(ids), list(best.shape)
    first: torch.Tensor = _first(_eagerly, w, ids, counts, bag, best, shape, range(n), n)
    return first


_library = torch.library.Library("torchard", "FRAGMENT")
_OPERANDS = "Tensor w, Tensor ids, Tensor counts, Tensor bag"
for _fn, _schema in (
    (_largest_of_bags, f"largest_of_bags({_OPERANDS}, int bags) -> Tensor"),
    (_first_of_bags, f"first_of_bags({_OPERANDS}, Tensor best) -> Tensor"),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _fn, "CompositeExplicitAutograd")

LARGEST: Any = torch.ops.torchard.largest_of_bags.default
FIRST: Any = torch.ops.torchard.first_of_bags.default


def _fake_largest(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, bags: int
) -> torch.Tensor:
    return w.new_empty([bags, w.shape[1]])


def _fake_first(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    return bag.new_empty(best.shape)


torch.library.register_fake("torchard::largest_of_bags", _fake_largest, lib=_library)
torch.library.register_fake("torchard::first_of_bags", _fake_first, lib=_library)


def largest_of_bags(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, bags: int
) -> torch.Tensor:
    """The largest of each bag's rows, in every column.

    Args:
        w: a table [v, d].
        ids: the rows in bags, [n].
        counts: which ids count, bool [n].
        bag: the bag of each id, int64 [n].
        bags: the number of bags.

    Returns:
        [bags, d], minus infinity where nothing counts; NaN if a row has it.
    """
    largest: torch.Tensor = LARGEST(w, ids, counts, bag, bags)
    return largest


def first_of_bags(
    w: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, bag: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """The first place in ``ids`` with a row as large as ``best`` [bags, d]; n if there is none."""
    first: torch.Tensor = FIRST(w, ids, counts, bag, best)
    return first


def _own_ids(call: Call, local: Local) -> tuple[Any, Any]:
    """The ids relative to a rank's rows, and which of them count on the rank."""
    _, ids, counts, *_ = local.args
    own, size = local.operand_range(0, 0), call.ins[0][0]
    if len(own) == size:
        return ids, counts
    mask, ids = owned(local, ids, own, size, refuse=True)
    return ids, local.call(aten.logical_and.default, mask, counts)


def _emit_largest(call: Call, local: Local) -> Any:
    table, _, _, bag, _ = local.args
    ids, counts = _own_ids(call, local)
    like = VAL.of(call.node)
    return _largest(local.call, table, ids, counts, bag, local.shape(), like)


def _emit_first(call: Call, local: Local) -> Any:
    table, _, _, bag, best = local.args
    ids, counts = _own_ids(call, local)
    places, after = local.operand_range(1, 0), call.ins[1][0]
    return _first(local.call, table, ids, counts, bag, best, local.shape(), places, after)


register_rule(
    LARGEST,
    text="v d, n, n, n -> b d | reduce v max | reduce n max | run v",
    emit=_emit_largest,
)
register_rule(
    FIRST,
    text="v d, n, n, n, b d -> b d | reduce v min | reduce n min | run v n | whole b",
    emit=_emit_first,
)
