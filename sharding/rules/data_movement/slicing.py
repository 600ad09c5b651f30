"""Slicing and concatenation along a dim: slice, split, cat.

Slicing at multiples of g slices the outer factor of a dim written ``(n/g g)``; the inner factor may be
split. So fused projections (gate and up; q, k and v) are separated without a gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell

Bounds = tuple[int, int]  # start and stop along the dim


def _slice(call: Call) -> tuple[int, list[Bounds], int]:
    """The dim, the bounds of the slice, and the step."""
    shape = call.ins[0]
    dim = call.arg(1, "dim", 0) % len(shape)
    start, stop, step = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    return dim, [slice(start, stop).indices(shape[dim])[:2]], step


def _slice_backward(call: Call) -> tuple[int, list[Bounds], int]:
    shape = call.outs[0]
    dim = call.arg(2) % len(shape)
    return dim, [slice(call.arg(3), call.arg(4)).indices(shape[dim])[:2]], call.arg(5)


def _parts(dim: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, list[Bounds], int]:
    """The dim, the bounds of consecutive slices of these shapes, and step 1."""
    bounds = list(itertools.accumulate((shape[dim] for shape in shapes), initial=0))
    return dim, list(itertools.pairwise(bounds)), 1


def _split(call: Call) -> tuple[int, list[Bounds], int]:
    return _parts(call.arg(2, "dim", 0) % len(call.ins[0]), call.outs)


def _cat(call: Call) -> tuple[int, list[Bounds], int]:
    return _parts(call.arg(1, "dim", 0) % len(call.ins[0]), call.ins)


def _grain(size: int, pieces: Sequence[Bounds], step: int) -> int:
    """The largest g that divides all bounds; 1 for strided and empty slices."""
    if step != 1 or size == 0 or any(start >= stop for start, stop in pieces):
        return 1
    return math.gcd(size, *(bound for piece in pieces for bound in piece))


def _dims(
    rank: int, dim: int, size: int, pieces: Sequence[Bounds], step: int
) -> tuple[str, list[str], str]:
    """The dims of the whole and of each slice, and the clause on what may not be split."""
    grain, names = _grain(size, pieces, step), letters(rank)

    def with_dim(text: str) -> str:
        return spell([text if i == dim else n for i, n in enumerate(names)])

    if len(pieces) == 1 and pieces[0] == (0, size) and step == 1:
        return spell(names), [spell(names)], ""
    if grain == 1:
        slices = [with_dim(f"w{k}") for k in range(len(pieces))]
        return with_dim("w"), slices, " | whole w " + " ".join(f"w{k}" for k in range(len(pieces)))
    slices = [with_dim(f"(w{k}={(b - a) // grain} g={grain})") for k, (a, b) in enumerate(pieces)]
    whole = " ".join(f"w{k}" for k in range(len(pieces)))
    return with_dim(f"(w={size // grain} g={grain})"), slices, f" | whole w {whole}"


def _slice_text(call: Call) -> str:
    dim, pieces, step = _slice(call)
    full, slices, clause = _dims(len(call.ins[0]), dim, call.ins[0][dim], pieces, step)
    return f"{full} -> {slices[0]} | linear 0{clause}"


def _slice_backward_text(call: Call) -> str:
    dim, pieces, step = _slice_backward(call)
    full, slices, clause = _dims(len(call.outs[0]), dim, call.outs[0][dim], pieces, step)
    return f"{slices[0]} -> {full} | linear 0{clause}"


def _split_text(call: Call) -> str:
    dim, pieces, step = _split(call)
    full, slices, clause = _dims(len(call.ins[0]), dim, call.ins[0][dim], pieces, step)
    return f"{full} -> {', '.join(slices)} | linear 0{clause}"


def _cat_text(call: Call) -> str | None:
    if len({len(shape) for shape in call.ins}) != 1:
        return None  # torch accepts empty tensors of rank one together with any other rank
    dim, pieces, step = _cat(call)
    full, slices, clause = _dims(len(call.outs[0]), dim, call.outs[0][dim], pieces, step)
    joint = " ".join(str(k) for k in range(len(slices)))
    return f"{', '.join(slices)} -> {full} | linear {joint}{clause}"


def _local(bounds: Sequence[int], size: int, local_size: int) -> list[int]:
    """Bounds on a dim of ``size``, as bounds on its ``local_size`` local elements.

    The outer factor is whole, so a bound after k of its n steps falls after k of n equal local runs.
    """
    return [bound * local_size // size for bound in bounds] if size else list(bounds)


def _emit_slice(call: Call, local: Local) -> Any:
    dim, (piece,), step = _slice(call)
    start, stop = _local(piece, call.ins[0][dim], local.operand_shape(0)[dim])
    return local.call(aten.slice.Tensor, local.args[0], dim, start, stop, step)


def _emit_slice_backward(call: Call, local: Local) -> Any:
    dim, (piece,), step = _slice_backward(call)
    shape = local.shape()
    start, stop = _local(piece, call.outs[0][dim], shape[dim])
    return local.call(call.target, local.args[0], shape, dim, start, stop, step)


def _emit_split(call: Call, local: Local) -> Any:
    dim, pieces, _ = _split(call)
    sizes = [b - a for a, b in pieces]
    local_sizes = _local(sizes, call.ins[0][dim], local.operand_shape(0)[dim])
    return local.call(aten.split_with_sizes.default, local.args[0], local_sizes, dim)


register_rule(aten.slice.Tensor, text=_slice_text, emit=_emit_slice)
register_rule(aten.slice_backward.default, text=_slice_backward_text, emit=_emit_slice_backward)
register_rule(
    aten.split.Tensor, aten.split_with_sizes.default, text=_split_text, emit=_emit_split
)
register_rule(aten.cat.default, text=_cat_text)
