"""Reads and writes of single rows of a dim: select, select_scatter, slice_scatter, unbind, stack.

A selected row is a lookup with a known index: the rank that owns the row contributes it, the others
contribute zeros, and the sum is pending until the row is used. Its gradient and writes to it are local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell

__all__ = ["zeros"]


def zeros(call: Call, local: Local, shape: Sequence[int]) -> Any:
    """Zeros with the dtype and device of a call's first result."""
    like = _first_result(call)
    return local.call(aten.full.default, list(shape), 0, dtype=like.dtype, device=like.device)


def _first_result(call: Call) -> torch.Tensor:
    val = VAL.of(call.node)
    like: torch.Tensor = val[0] if isinstance(val, (tuple, list)) else val
    return like


def _row(index: int, size: int, own: range) -> int | None:
    """The index of a row among those owned; None if another rank owns it."""
    index %= size
    return index - own.start if index in own else None


def _select(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dim = call.arg(1) % len(names)
    kept = names[:dim] + names[dim + 1 :]
    row = names[dim]
    return f"{spell(names)} -> {spell(kept)} | reduce {row} sum | run {row} | linear 0"


def _emit_select(call: Call, local: Local) -> Any:
    dim = call.arg(1) % len(call.ins[0])
    row = _row(call.arg(2), call.ins[0][dim], local.operand_range(0, dim))
    if row is None:
        return zeros(call, local, local.shape())
    return local.call(call.target, local.args[0], dim, row)


register_rule(aten.select.int, text=_select, emit=_emit_select)


def _select_backward(call: Call) -> str:
    """Zeros, with the gradient of the row on the rank that owns it."""
    names = letters(len(call.outs[0]))
    dim = call.arg(2) % len(names)
    kept = names[:dim] + names[dim + 1 :]
    return f"{spell(kept)} -> {spell(names)} | index {names[dim]} | run {names[dim]} | linear 0"


def _emit_select_backward(call: Call, local: Local) -> Any:
    dim = call.arg(2) % len(call.outs[0])
    row = _row(call.arg(3), call.outs[0][dim], local.result_range(dim))
    if row is None:
        return zeros(call, local, local.shape())
    return local.call(call.target, local.args[0], local.shape(), dim, row)


register_rule(aten.select_backward.default, text=_select_backward, emit=_emit_select_backward)


def _select_scatter(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dim = call.arg(2) % len(names)
    row = spell(names[:dim] + names[dim + 1 :])
    return f"{spell(names)}, {row} -> {spell(names)} | run {names[dim]} | linear 0 1"


def _emit_select_scatter(call: Call, local: Local) -> Any:
    dim = call.arg(2) % len(call.ins[0])
    row = _row(call.arg(3), call.ins[0][dim], local.result_range(dim))
    if row is None:
        return local.call(aten.clone.default, local.args[0])
    return local.call(call.target, *local.args[:2], dim, row)


register_rule(aten.select_scatter.default, text=_select_scatter, emit=_emit_select_scatter)


def _places(call: Call) -> tuple[int, range]:
    """The dim of a slice_scatter, and the rows that it writes."""
    dim = call.arg(2, "dim", 0) % len(call.ins[0])
    ends = slice(call.arg(3, "start"), call.arg(4, "end"), call.arg(5, "step", 1))
    return dim, range(*ends.indices(call.ins[0][dim]))


def _slice_scatter(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dim, places = _places(call)
    if places == range(call.ins[0][dim]):
        return f"{spell(names)}, {spell(names)} -> {spell(names)} | linear 0 1"
    written = [f"w{i}" if i == dim else n for i, n in enumerate(names)]
    return (
        f"{spell(names)}, {spell(written)} -> {spell(names)} "
        f"| whole w{dim} | run {names[dim]} | linear 0 1"
    )


def _emit_slice_scatter(call: Call, local: Local) -> Any:
    """Write the rows that fall into the owned run."""
    dim, places = _places(call)
    table, written = local.args[:2]
    if places == range(call.ins[0][dim]):
        return local.call(aten.clone.default, written)
    own = local.result_range(dim)
    first = -(-(max(own.start, places.start) - places.start) // places.step)
    mine = places[first:][: len(range(places.start + first * places.step, own.stop, places.step))]
    if not mine:
        return local.call(aten.clone.default, table)
    if len(mine) < len(places):
        written = local.call(aten.slice.Tensor, written, dim, first, first + len(mine))
    start, stop = mine[0] - own.start, mine[-1] + 1 - own.start
    return local.call(call.target, table, written, dim, start, stop, places.step)


register_rule(aten.slice_scatter.default, text=_slice_scatter, emit=_emit_slice_scatter)


def _unbind(call: Call) -> str:
    """All rows of a whole dim; where few of them are read, ``cuts.py`` replaces this by selects."""
    names = letters(len(call.ins[0]))
    dim = call.arg(1, "dim", 0) % len(names)
    kept = spell(names[:dim] + names[dim + 1 :])
    outs = ", ".join([kept] * len(call.outs))
    return f"{spell(names)} -> {outs} | linear 0 | whole {names[dim]}"


register_rule(aten.unbind.int, text=_unbind)


def _stack(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dim = call.arg(1, "dim", 0) % (len(names) + 1)
    out = [*names[:dim], "s", *names[dim:]]
    joint = " ".join(str(k) for k in range(len(call.ins)))
    ins = ", ".join([spell(names)] * len(call.ins))
    return f"{ins} -> {spell(out)} | index s | run s | linear {joint}"


def _emit_stack(call: Call, local: Local) -> Any:
    dim = call.arg(1, "dim", 0) % len(call.outs[0])
    own = local.result_range(dim)
    return local.call(aten.stack.default, local.args[0][own.start : own.stop], dim)


register_rule(aten.stack.default, text=_stack, emit=_emit_stack)
