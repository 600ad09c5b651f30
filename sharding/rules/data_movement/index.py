"""Lookups (embedding, gather, index) and their transposes (scatter, index_put, index_add).

Each rank looks up the rows of a split table that it owns, with zeros for all others; the results are
partial sums. Writes to rows that a rank does not own are masked or sent to a spare slot. Where rows
are added to zeros, as in gradients of lookups, the ids may be split too: the results are partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from torchard.functional.programs.constants import is_zero
from torchard.functional.programs.tags import ORIGIN, PHASE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.data_movement.counting import (
    counted,
    counting_dim,
    indexed,
    local_count,
)
from torchard.sharding.rules.data_movement.owned import (
    from_the_end,
    masked,
    owned,
    sent_away,
    spare_slot,
)
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell


def _emit_embedding(call: Call, local: Local) -> Any:
    own, size = local.operand_range(0, 0), call.ins[0][0]
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    mask, ids = owned(local, local.args[1], own, size, refuse=True)
    rows = local.call(aten.embedding.default, local.args[0], ids)
    return masked(local, mask, rows, len(call.ins[1]), len(call.outs[0]))


register_rule(
    aten.embedding.default,
    text="v d, ... -> ... d | reduce v sum | run v | linear 0",
    emit=_emit_embedding,
)


def _embedding_backward(call: Call) -> str | None:
    if call.arg(4, "scale_grad_by_freq", False):
        return None
    return _rows_per_example(call) or "... d, ... -> v d | index v | run v | linear 0"


def _rows_per_example(call: Call) -> str | None:
    """vmap's gradients of a table, one below the other: each example's ids point at rows of its own."""
    ids = call.node.args[1]
    if not isinstance(ids, fx.Node) or ids.target is not aten.add.Tensor or ids.kwargs:
        return None
    if PHASE.get(ids) != "backward" or ORIGIN.get(ids) != ORIGIN.get(call.node):
        return None  # not vmap's: nothing says that its ids stay within the rows of their example
    for first in ids.all_input_nodes:
        counts, shape = tuple(VAL.of(first).shape), call.ins[1]
        dim = counts.index(max(counts)) if counts else None
        if dim is None or counts[dim] < 2 or len(counts) != len(shape) or counts[dim] != shape[dim]:
            continue
        rows, extra = divmod(call.outs[0][0], counts[dim])
        if not extra and counted(first, rows) == dim:
            names = [f"k{d}" for d in range(len(shape))]
            each = f"({names[dim]} v)"
            return f"{spell(names)} d, {spell(names)} -> {each} d | whole v | linear 0"
    return None


def _emit_embedding_backward(call: Call, local: Local) -> Any:
    dim = counting_dim(call, local, 1, local.result_axes(0))
    if dim is not None:
        return _emit_rows_per_example(call, local, dim)
    own, size = local.result_range(0), call.outs[0][0]
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    grad, ids = local.args[0], local.args[1]
    mask, ids = owned(local, ids, own, size, refuse=False)
    grad = masked(local, mask, grad, len(call.ins[1]), len(call.ins[0]))
    pad = call.arg(3)
    pad = pad - own.start if pad in own else -1
    return local.call(call.target, grad, ids, len(own), pad, False)


def _emit_rows_per_example(call: Call, local: Local, dim: int) -> Any:
    """The ids count examples along ``dim``: they are those of the rank's examples."""
    grad, ids = local.args[0], local.args[1]
    rows = call.outs[0][0] // call.ins[1][dim]
    within = local.call(aten.remainder.Scalar, ids, rows)
    ids = local.call(aten.add.Tensor, within, local_count(call, local, 1, dim, rows))
    return local.call(call.target, grad, ids, local.shape()[0], -1, False)


register_rule(
    aten.embedding_dense_backward.default,
    text=_embedding_backward,
    emit=_emit_embedding_backward,
)


def _gather_names(call: Call, index: int) -> tuple[list[str], list[str], list[str], int]:
    """The dims of table and index, those that are whole (their sizes differ), and the dim looked up."""
    table, ids = call.ins[0], call.ins[index]
    dim = call.arg(1) % max(len(table), 1)
    names, picked, whole = letters(len(table)), [], []
    for d, name in enumerate(names):
        same = d != dim and table[d] == ids[d]
        picked.append(name if same else f"k{d}")
        if not same and d != dim:
            whole += [name, f"k{d}"]
    return names, picked, whole, dim


def _gather(call: Call) -> str | None:
    if not call.ins[0] or len(call.ins[0]) != len(call.ins[1]):
        return None  # an empty index may have any rank
    names, picked, whole, dim = _gather_names(call, 1)
    clauses = f" | reduce {names[dim]} sum | run {names[dim]} | linear 0"
    clauses += "".join(f" | whole {w}" for w in whole)
    return f"{spell(names)}, {spell(picked)} -> {spell(picked)}{clauses}"


def _emit_gather(call: Call, local: Local) -> Any:
    dim = call.arg(1) % len(call.ins[0])
    own, size = local.operand_range(0, dim), call.ins[0][dim]
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    mask, ids = owned(local, local.args[2], own, size, refuse=True)
    values = local.call(aten.gather.default, local.args[0], dim, ids)
    return local.call(aten.where.ScalarOther, mask, values, False)


register_rule(aten.gather.default, text=_gather, emit=_emit_gather)


def _adds_to_zeros(call: Call) -> bool:
    """Whether the results of parts of the written values add up to the result."""
    return _adds(call) and is_zero(call.operands[0])


def _adds(call: Call) -> bool:
    """Whether values are added where they are written."""
    accumulates = call.target is aten.index_put.default and call.arg(3, "accumulate", False)
    return call.target in _SUMMING or bool(accumulates)


def _added(call: Call, values: int, parts: str) -> str:
    """The clauses of what is written to a table: linear in the values, and whose own dims are whole.

    Args:
        values: the position of the operand that is written.
        parts: the names of the written values' own dims.
    """
    if _adds_to_zeros(call):
        return f" | linear {values}"
    table = "" if is_zero(call.operands[0]) else "0 "
    return f" | linear {table}{values}" + "".join(f" | whole {name}" for name in parts.split())


def _scatter(call: Call) -> str | None:
    """scatter, scatter_add: the dim written along may be split in the table, not in the index.

    Sums of zeros and what is written may be split along both.
    """
    if not call.ins[0] or len(call.ins[0]) != len(call.ins[1]):
        return None  # an empty index may have any rank
    names, picked, whole, dim = _gather_names(call, 1)
    ins = [spell(names)] + [spell(picked)] * (len(call.ins) - 1)
    if len(call.ins) == 3 and call.ins[2] != call.ins[1]:
        return None
    added = _added(call, 2, picked[dim]) if len(ins) == 3 else f" | whole {picked[dim]}"
    clauses = f" | run {names[dim]}{added}"
    return f"{', '.join(ins)} -> {spell(names)}{clauses}" + "".join(f" | whole {w}" for w in whole)




_SUMMING = (aten.scatter_add.default, aten.index_add.default)  # a masked value adds zero


def _ids_in(call: Call, dim: int) -> tuple[int, int]:
    """The end of the ids' dims among those of the written values, and the rank of the values."""
    rank = len(call.ins[2])
    return (rank if len(call.ins[1]) == rank else dim + 1), rank


def _emit_scatter(call: Call, local: Local) -> Any:
    """Writes to other ranks' rows add zero or, where they would replace values, go to a spare slot."""
    dim = call.arg(1) % len(call.ins[0])
    own, size = local.result_range(dim), call.outs[0][dim]
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    table, _, ids, *rest = local.args
    if call.target in _SUMMING:
        mask, ids = owned(local, ids, own, size, refuse=False)
        rest[0] = masked(local, mask, rest[0], *_ids_in(call, dim))
        return local.call(call.target, table, dim, ids, *rest, **local.kwargs)
    ids = sent_away(local, ids, own, size)
    extended = spare_slot(local, table, local.shape(), dim)
    out = local.call(call.target, extended, dim, ids, *rest, **local.kwargs)
    return local.call(aten.slice.Tensor, out, dim, 0, len(own))


register_rule(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter_add.default,
    text=_scatter,
    emit=_emit_scatter,
)


def _scatter_reduce(call: Call) -> str | None:
    """The dim written along is whole: which of several values counts is known to all of them only."""
    if not call.ins[0] or len(call.ins[0]) != len(call.ins[1]) or call.ins[1] != call.ins[2]:
        return None
    names, picked, whole, dim = _gather_names(call, 1)
    clauses = "".join(f" | whole {w}" for w in (names[dim], picked[dim], *whole))
    return f"{spell(names)}, {spell(picked)}, {spell(picked)} -> {spell(names)}{clauses}"


register_rule(aten.scatter_reduce.two, text=_scatter_reduce)


def _index_select(call: Call) -> str | None:
    if not call.ins[0]:
        return None
    names = letters(len(call.ins[0]))
    dim = call.arg(1) % len(names)
    out = list(names)
    out[dim] = "k"
    ids = "k" if len(call.ins[1]) == 1 else ""
    extra = "" if ids else " | whole k"
    clauses = f" | reduce {names[dim]} sum | run {names[dim]} | linear 0"
    return f"{spell(names)}, {ids} -> {spell(out)}{clauses}{extra}"


def _emit_index_select(call: Call, local: Local) -> Any:
    dim = call.arg(1) % len(call.ins[0])
    own, size = local.operand_range(0, dim), call.ins[0][dim]
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    mask, ids = owned(local, local.args[2], own, size, refuse=True)
    rows = local.call(aten.index_select.default, local.args[0], dim, ids)
    return masked(local, mask, rows, dim + 1, len(call.outs[0]))


register_rule(aten.index_select.default, text=_index_select, emit=_emit_index_select)


def _index(call: Call) -> str | None:
    """``x[..., i, j, ...]``: a masked lookup along every indexed dim that is split."""
    dims = indexed(call)
    if dims is None:
        return None
    ins = ", ".join([spell(dims.table), *dims.indices])
    clauses = "".join(f" | reduce {name} sum" for name in dims.looked_up)
    clauses += "".join(f" | run {name}" for name in dims.looked_up)
    return f"{ins} -> {spell(dims.around(dims.table, dims.picked))} | linear 0{clauses}"


def _looked_up(
    call: Call,
    local: Local,
    indices: list[Any],
    axes: Callable[[int], Sequence[str]],
    runs: Callable[[int], range],
) -> list[tuple[int, range]]:
    """Let indices that count a split dim count the rank's rows alone; the other split dims remain.

    Args:
        indices: the local indices, which are changed.
        axes: the axes that split a dim of the table.
        runs: the global indices that the rank owns of a dim.

    Returns:
        The dims of which the rank has a part and in which rows are looked up, each with what is owned.
    """
    rest = []
    used = [d for d, index in enumerate(indices) if index is not None]
    for operand, d in enumerate(used, start=1):
        dim = counting_dim(call, local, operand, axes(d))
        if dim is not None:
            indices[d] = local_count(call, local, operand, dim)
        elif len(own := runs(d)) < call.ins[0][d]:
            rest.append((d, own))
    return rest


def _emit_index(call: Call, local: Local) -> Any:
    table, indices = local.args[0], list(local.args[1])
    masks = []
    axes, runs = partial(local.operand_axes, 0), partial(local.operand_range, 0)
    for d, own in _looked_up(call, local, indices, axes, runs):
        size = call.ins[0][d]
        ids = from_the_end(local, indices[d], size)
        mask, shifted = owned(local, ids, own, size, refuse=True)
        if own.start == 0:  # an id that is still negative is out of bounds: it must not count again
            out_of_bounds = local.call(aten.lt.Scalar, shifted, 0)
            shifted = local.call(aten.masked_fill.Scalar, shifted, out_of_bounds, len(own))
        indices[d] = shifted
        masks.append(mask)
    values = local.call(call.target, table, indices)
    dims = indexed(call)
    assert dims is not None
    for mask in masks:
        values = masked(local, mask, values, dims.at + len(dims.picked), len(call.outs[0]))
    return values


register_rule(aten.index.Tensor, text=_index, emit=_emit_index)


def _index_put(call: Call) -> str | None:
    """The transpose of ``x[..., i, j, ...]``: writes are masked.

    The dims that are the indices' own are whole, unless zeros and what is written are added up.
    """
    dims = indexed(call)
    if dims is None or call.ins[-1] != tuple(dims.around(call.ins[0], dims.sizes)):
        return None
    ins = [spell(dims.table), *dims.indices, spell(dims.around(dims.table, dims.picked))]
    clauses = "".join(f" | run {name}" for name in dims.looked_up)
    clauses += _added(call, len(ins) - 1, spell([dims.picked[i] for i in dims.own]))
    return f"{', '.join(ins)} -> {spell(dims.table)}{clauses}"


def _emit_index_put(call: Call, local: Local) -> Any:
    """As for scatter: sums are masked, other writes have a spare slot along each split dim."""
    table, indices, *rest = local.args
    if len(rest) > 1 and rest[1]:
        return _emit_summing_put(call, local)
    indices, shape = list(indices), local.shape()
    used = [d for d, index in enumerate(indices) if index is not None]
    looked_up = _looked_up(call, local, indices, local.result_axes, local.result_range)
    if all(math.prod(call.ins[1 + used.index(d)]) == 1 for d, _ in looked_up):
        return _emit_put_in_one_place(call, local, indices, looked_up)
    split = []
    for d, own in looked_up:
        size = call.outs[0][d]
        indices[d] = sent_away(local, from_the_end(local, indices[d], size), own, size)
        table = spare_slot(local, table, shape, d)
        shape[d] += 1
        split.append((d, len(own)))
    out = local.call(call.target, table, indices, *rest, **local.kwargs)
    for d, n in split:
        out = local.call(aten.slice.Tensor, out, d, 0, n)
    return out


def _emit_put_in_one_place(
    call: Call, local: Local, indices: list[Any], looked_up: Sequence[tuple[int, range]]
) -> Any:
    """Write where a single index of each split dim points: on other ranks, what is there already.

    The table is not copied for a spare slot, so that a cache that is split along it is written in place.
    """
    table, _, values, *rest = local.args
    masks = []
    for d, own in looked_up:
        size = call.outs[0][d]
        ids = from_the_end(local, indices[d], size)
        mask, indices[d] = owned(local, ids, own, size, refuse=False)
        masks.append(local.call(aten.reshape.default, mask, []))
    for here in masks:
        before = local.call(aten.index.Tensor, table, indices)
        values = local.call(aten.where.self, here, values, before)
    return local.call(call.target, table, indices, values, *rest, **local.kwargs)


def _emit_summing_put(call: Call, local: Local) -> Any:
    table, indices, values, accumulate = local.args
    indices, rank = list(indices), len(call.ins[-1])
    dims = indexed(call)
    assert dims is not None
    for d, own in _looked_up(call, local, indices, local.result_axes, local.result_range):
        size = call.outs[0][d]
        ids = from_the_end(local, indices[d], size)
        mask, indices[d] = owned(local, ids, own, size, refuse=False)
        values = masked(local, mask, values, dims.at + len(dims.picked), rank)
    return local.call(call.target, table, indices, values, accumulate)


register_rule(aten.index_put.default, text=_index_put, emit=_emit_index_put)


def _index_add(call: Call) -> str | None:
    """The transpose of index_select: writes are masked, and added up if the table is zero."""
    if not call.ins[0] or len(call.ins[1]) != 1:
        return None
    names = letters(len(call.ins[0]))
    dim = call.arg(1) % len(names)
    source = [*names[:dim], "k", *names[dim + 1 :]]
    clauses = f" | run {names[dim]}{_added(call, 2, 'k')}"
    return f"{spell(names)}, k, {spell(source)} -> {spell(names)}{clauses}"


register_rule(aten.index_add.default, text=_index_add, emit=_emit_scatter)
