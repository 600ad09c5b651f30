"""Attention whose scores are soft-capped, of some heads at a time: cap * tanh(scale * q @ k.mT) + mask.

torch's own attention has no caps. The scores of a few heads stay in a cache, so that the passes over them
do not go through memory; the backward computes them again.

Source: Gemma Team 2024 (arXiv:2408.00118), section 2; Dao et al. 2022 (arXiv:2205.14135): recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchard.functional.torch_internals.operators import aten
from torchard.kernels.library.attention import WEIGHTS, Weights
from torchard.kernels.patterns.kernel import Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern

__all__ = ["attention_capped"]

# Elements of the scores in a block of heads.
_BLOCK = 1 << 19


def _capped(weights: Weights) -> Callable[..., Tensor]:
    def attention_capped(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Any = ..., cap: Any = ...
    ) -> Tensor:
        scores = torch.tanh(q @ k.transpose(-2, -1) * scale) * cap + mask.detach()
        return weights(scores, q.dtype) @ v

    return attention_capped


class _Heads:
    """The heads of q [b, h, s, d], k [b, h, t, d] and v [b, h, t, e], in blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> None:
        self.scale, self.cap = scale, cap
        self.wide = torch.promote_types(q.dtype, torch.float32)
        b, h, s, t = *q.shape[:3], k.shape[2]
        self.parts = [x.flatten(0, 1) for x in (q, k, v)]
        self.mask = mask.to(self.wide).expand(b, h, s, t)
        self.heads, self.step = b * h, max(1, _BLOCK // max(1, s * t))
        self.h = h

    def blocks(self) -> Iterator[tuple[slice, list[Tensor], Tensor, Tensor]]:
        """For some heads: which, their q, k and v, the hyperbolic tangents, and the weights."""
        for start in range(0, self.heads, self.step):
            some = slice(start, min(start + self.step, self.heads))
            q, k, v = (x[some] for x in self.parts)
            tanh = torch.bmm(q, k.mT).to(self.wide).mul_(self.scale).tanh_()
            scores = tanh * self.cap
            for i in range(scores.shape[0]):
                scores[i] += self.mask[divmod(start + i, self.h)]
            yield some, [q, k, v], tanh, torch.softmax(scores, -1, out=scores)


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    heads = _Heads(q, k, v, mask, scale, cap)
    out = v.new_empty((*q.shape[:3], v.shape[3]))
    for some, (_, _, of_v), _, weights in heads.blocks():
        torch.bmm(weights.to(v.dtype), of_v, out=out.flatten(0, 1)[some])
    return out


def _vjp(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cotangent: Tensor, scale: float, cap: float
) -> tuple[Tensor, ...]:
    heads = _Heads(q, k, v, mask, scale, cap)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    to_q, to_k, to_v = (x.flatten(0, 1) for x in grads)
    above = cotangent.flatten(0, 1)
    for some, (of_q, of_k, of_v), tanh, weights in heads.blocks():
        ct = above[some]
        torch.bmm(weights.to(v.dtype).mT, ct, out=to_v[some])
        slope = aten._softmax_backward_data.default(
            torch.bmm(ct, of_v.mT).to(heads.wide), weights, -1, heads.wide
        )
        aten.tanh_backward.grad_input(slope, tanh, grad_input=slope)
        scores = slope.mul_(scale * cap).to(q.dtype)
        torch.bmm(scores, of_k, out=to_q[some])
        torch.bmm(scores.mT, of_q, out=to_k[some])
    return tuple(grads)


attention_capped = register_kernel(
    Kernel(
        "attention_capped",
        tuple(
            Pattern(
                _capped(weights),
                f"b h s d, b h t d, b h t e, {mask} -> b h s e | whole t d",
                name="attention_capped",
            )
            for mask in ("s t", "1 1 s t", "b 1 s t")
            for weights in WEIGHTS
        ),
        "b h s d, b h t d, b h t e, s t -> b h s e | whole t d",
        {"cpu": _run},
        {"cpu": _vjp},
    )
)
