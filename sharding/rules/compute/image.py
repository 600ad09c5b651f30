"""Pooling, padding and resampling of images: batch and channels may be split, spatial dims may not."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule
from torchard.sharding.rules.registry.batched import batched, emit_contiguous

for _name, _dims, _count in [
    ("_adaptive_avg_pool2d", 2, 1),
    ("_adaptive_avg_pool3d", 3, 1),
    ("adaptive_max_pool2d", 2, 2),
    ("adaptive_max_pool3d", 3, 2),
    ("avg_pool2d", 2, 1),
    ("avg_pool3d", 3, 1),
    ("max_pool2d_with_indices", 2, 2),
    ("max_pool3d_with_indices", 3, 2),
    ("reflection_pad1d", 1, 1),
    ("reflection_pad2d", 2, 1),
    ("reflection_pad3d", 3, 1),
    ("replication_pad1d", 1, 1),
    ("replication_pad2d", 2, 1),
    ("replication_pad3d", 3, 1),
    ("_upsample_bilinear2d_aa", 2, 1),
    ("_upsample_bicubic2d_aa", 2, 1),
    ("_upsample_nearest_exact1d", 1, 1),
    ("_upsample_nearest_exact2d", 2, 1),
    ("_upsample_nearest_exact3d", 3, 1),
    ("upsample_bicubic2d", 2, 1),
    ("upsample_bilinear2d", 2, 1),
    ("upsample_linear1d", 1, 1),
    ("upsample_nearest1d", 1, 1),
    ("upsample_nearest2d", 2, 1),
    ("upsample_nearest3d", 3, 1),
    ("upsample_trilinear3d", 3, 1),
]:
    batched(getattr(aten, _name).default, ins=(_dims,), outs=(_dims,) * _count)

# Their operands are a gradient and the operand that it is for; those of max pools also take indices.
for _name, _dims, _count in [
    ("_adaptive_avg_pool2d_backward", 2, 2),
    ("_adaptive_avg_pool3d_backward", 3, 2),
    ("adaptive_max_pool2d_backward", 2, 3),
    ("adaptive_max_pool3d_backward", 3, 3),
    ("avg_pool2d_backward", 2, 2),
    ("avg_pool3d_backward", 3, 2),
    ("max_pool2d_with_indices_backward", 2, 3),
    ("max_pool3d_with_indices_backward", 3, 3),
    ("reflection_pad1d_backward", 1, 2),
    ("reflection_pad2d_backward", 2, 2),
    ("reflection_pad3d_backward", 3, 2),
    ("replication_pad1d_backward", 1, 2),
    ("replication_pad2d_backward", 2, 2),
    ("replication_pad3d_backward", 3, 2),
]:
    batched(
        getattr(aten, _name).default,
        ins=(_dims,) * _count,
        outs=(_dims,),
        clauses=" | linear 0",
        emit=emit_contiguous,
    )


def _emit_resampled(call: Call, local: Local) -> Any:
    """upsample_*_backward(gradient, output size, input size, ...), with the local input size."""
    grad, size, _, *rest = local.args
    return local.call(call.target, grad, size, local.shape(), *rest, **local.kwargs)


for _name, _dims in [
    ("_upsample_bilinear2d_aa_backward", 2),
    ("_upsample_bicubic2d_aa_backward", 2),
    ("_upsample_nearest_exact1d_backward", 1),
    ("_upsample_nearest_exact2d_backward", 2),
    ("_upsample_nearest_exact3d_backward", 3),
    ("upsample_bicubic2d_backward", 2),
    ("upsample_bilinear2d_backward", 2),
    ("upsample_linear1d_backward", 1),
    ("upsample_nearest1d_backward", 1),
    ("upsample_nearest2d_backward", 2),
    ("upsample_nearest3d_backward", 3),
    ("upsample_trilinear3d_backward", 3),
]:
    batched(
        getattr(aten, _name).default,
        ins=(_dims,),
        outs=(_dims,),
        clauses=" | linear 0",
        emit=_emit_resampled,
    )


def _grid(call: Call) -> str:
    names = ["w", "h", "d"][: len(call.ins[0]) - 2]
    image, points = " ".join(names), " ".join(f"o{n}" for n in names)
    return f"n c {image}, n {points} two -> n c {points} | whole {image} {points} two"


def _grid_backward(call: Call) -> str:
    """A point of the grid samples every channel, so its gradient is a sum over channels."""
    names = ["w", "h", "d"][: len(call.ins[1]) - 2]
    image, points = " ".join(names), " ".join(f"o{n}" for n in names)
    results = zip((f"n c {image}", f"n {points} two"), VAL.of(call.node), strict=True)
    wanted = [dims for dims, value in results if isinstance(value, torch.Tensor)]
    return (
        f"n c {points}, n c {image}, n {points} two -> {', '.join(wanted)} | linear 0 "
        f"| whole {image} {points} two"
    )


register_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, text=_grid)
register_rule(
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, text=_grid_backward
)


def _columns(call: Call) -> str:
    """im2col: a column holds a window of every channel; channels are its outer factor."""
    channels = call.ins[0][-3]
    return f"... c h w -> ... (c={channels} k) l | linear 0 | whole h w k l"


def _columns_back(call: Call) -> str:
    channels = call.outs[0][-3]
    return f"... (c={channels} k) l -> ... c h w | linear 0 | whole h w k l"


register_rule(aten.im2col.default, text=_columns)
register_rule(aten.col2im.default, text=_columns_back)


def _pixels(call: Call) -> str:
    """Groups of r × r channels become blocks of r × r pixels, or the reverse; neither may be split."""
    r = call.arg(1)
    deep, wide = f"... (c r={r} s={r}) h w", f"... c (h r={r}) (w s={r})"
    before, after = (deep, wide) if call.target is aten.pixel_shuffle.default else (wide, deep)
    return f"{before} -> {after} | linear 0 | whole r s"


register_rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, text=_pixels)
