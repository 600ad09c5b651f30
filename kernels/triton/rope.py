"""Rotary position embedding of halves, forward and backward, which reads q once in any layout.

Source: Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import accumulator, cdiv, launch, tile_of

__all__ = ["rope", "rope_backward"]


@triton.jit
def _rotate(
    q,
    cos,
    sin,
    out,
    q_strides,
    out_strides,
    cos_strides,
    sin_strides,
    inner,
    outer,
    first,
    last,
    HEADS_INSIDE: tl.constexpr,
    BACKWARD: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate a tile of heads at one position, or of positions of one head, whichever are closer together.

    The first half of a row becomes q cos - partner sin, the last half q cos + partner sin. Backward, the
    signs are opposite, and sin is the partner's.
    """
    tiles = tl.cdiv(inner, ROWS)
    inside = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    outside = (tl.program_id(0) // tiles % outer).to(tl.int64)
    batch = (tl.program_id(0) // tiles // outer).to(tl.int64)
    head = inside if HEADS_INSIDE else outside
    position = outside if HEADS_INSIDE else inside
    q += batch * q_strides[0] + head * q_strides[1] + position * q_strides[2]
    out += batch * out_strides[0] + head * out_strides[1] + position * out_strides[2]
    cos += batch * cos_strides[0] + position * cos_strides[1]
    sin += batch * sin_strides[0] + position * sin_strides[1]

    at = tl.arange(0, BLOCK)[None, :]
    in_first = (inside < inner) & (at < first)
    in_last = (inside < inner) & (at < last)
    a = tl.load(q + at, mask=in_first, other=0).to(ACC)
    b = tl.load(q + first + at, mask=in_last, other=0).to(ACC)
    # The halves are each other's partners. The middle of an odd dim belongs to one of them.
    to_a = b if EVEN else tl.load(q + last + at, mask=in_first, other=0).to(ACC)
    to_b = a if EVEN else tl.load(q + at, mask=in_last, other=0).to(ACC)

    # Heads at one position share one row of cos and sin.
    of_first = at < first if HEADS_INSIDE else in_first
    of_last = at < last if HEADS_INSIDE else in_last
    cos_a = tl.load(cos + at, mask=of_first, other=0).to(ACC)
    cos_b = tl.load(cos + first + at, mask=of_last, other=0).to(ACC)
    sin_a = tl.load(sin + (last if BACKWARD else 0) + at, mask=of_first, other=0).to(ACC)
    sin_b = tl.load(sin + (0 if BACKWARD else first) + at, mask=of_last, other=0).to(ACC)
    sign: tl.constexpr = -1 if BACKWARD else 1
    tl.store(out + at, a * cos_a - sign * to_a * sin_a, mask=in_first)
    tl.store(out + first + at, b * cos_b + sign * to_b * sin_b, mask=in_last)


def _rotated(
    q: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, first: int, backward: bool
) -> Tensor:
    """Rotate q [b, h, s, d] by cos and sin [s, d] or [b, s, d]; the first half has ``first`` elements."""
    q, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, cos, sin))
    batch, heads, positions, d = q.shape
    out = torch.empty_like(q, dtype=dtype)
    heads_inside = q.stride(1) <= q.stride(2)
    inner, outer = (heads, positions) if heads_inside else (positions, heads)
    shape = tile_of(inner, max(first, d - first))
    launch(
        _rotate,
        (batch * outer * cdiv(inner, shape.rows) if d else 0,),
        *(q, cos, sin, out, q.stride()[:3], out.stride()[:3], _strides(cos), _strides(sin)),
        *(inner, outer, first, d - first),
        on=q,
        HEADS_INSIDE=heads_inside,
        BACKWARD=backward,
        EVEN=d % 2 == 0,
        ACC=accumulator(q, cos, sin),
        **shape.constants,
    )
    return out


def _strides(table: Tensor) -> tuple[int, int]:
    """The strides of a table between examples and between positions."""
    return (table.stride(0), table.stride(1)) if table.ndim == 3 else (0, table.stride(0))


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q [b, h, s, d] by cos and sin [s, d] or [b, s, d]; moves 2 b h s d elements."""
    dtype = torch.promote_types(q.dtype, torch.promote_types(cos.dtype, sin.dtype))
    return _rotated(q, cos, sin, dtype, q.shape[-1] - q.shape[-1] // 2, False)


def rope_backward(cos: Tensor, sin: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of q, and that of cos and sin, which is 0: the pattern detaches them."""
    dq = _rotated(cotangent, cos, sin, cotangent.dtype, cotangent.shape[-1] // 2, True)
    return dq, torch.zeros_like(cos)
