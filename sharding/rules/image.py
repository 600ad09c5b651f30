"""Windows on images: pooling, padding, resampling. Examples and channels may be split, pixels not."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.batched import batched, emit_contiguous
from torchard.sharding.rules.registry import Call, Local, register_rule

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

# A gradient, and the operand it is the gradient for; some kernels want the places of maxima, too.
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
    """upsample_*_backward(gradient, output size, input size, ...): the last is the whole shape."""
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
    image, places = " ".join(names), " ".join(f"o{n}" for n in names)
    return f"n c {image}, n {places} two -> n c {places} | whole {image} {places} two"


def _grid_backward(call: Call) -> str:
    """A place is read from every channel, so its gradient is their sum."""
    names = ["w", "h", "d"][: len(call.ins[1]) - 2]
    image, places = " ".join(names), " ".join(f"o{n}" for n in names)
    results = (f"n c {image}", f"n {places} two")
    made = zip(results, VAL.of(call.node), strict=True)
    wanted = [names for names, val in made if isinstance(val, torch.Tensor)]
    return (
        f"n c {places}, n c {image}, n {places} two -> {', '.join(wanted)} | linear 0 "
        f"| whole {image} {places} two"
    )


register_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, text=_grid)
register_rule(
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, text=_grid_backward
)


def _columns(call: Call) -> str:
    """Images as columns of their windows: channels are the outer factor of a column."""
    channels = call.ins[0][-3]
    return f"... c h w -> ... (c={channels} k) l | linear 0 | whole h w k l"


def _columns_back(call: Call) -> str:
    channels = call.outs[0][-3]
    return f"... (c={channels} k) l -> ... c h w | linear 0 | whole h w k l"


register_rule(aten.im2col.default, text=_columns)
register_rule(aten.col2im.default, text=_columns_back)


def _pixels(call: Call) -> str:
    """Blocks of r × r pixels are channels: both keep their outer factor."""
    r = call.arg(1)
    deep, wide = f"... (c r={r} s={r}) h w", f"... c (h r={r}) (w s={r})"
    ends = (deep, wide) if call.target is aten.pixel_shuffle.default else (wide, deep)
    return f"{ends[0]} -> {ends[1]} | linear 0 | whole r s"


register_rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, text=_pixels)
