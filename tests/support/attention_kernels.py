"""Torch's kernels of attention for CUDA devices, on a CPU: the same results, by plain operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from sample_calls import S, Sample, bools, x
from torch import Tensor

__all__ = ["SAMPLES"]

aten = torch.ops.aten
LIBRARY = torch.library.Library("aten", "IMPL")
CUDNN = aten._scaled_dot_product_cudnn_attention
EFFICIENT = aten._scaled_dot_product_efficient_attention
FLASH = aten._scaled_dot_product_flash_attention
SEED = torch.zeros((), dtype=torch.int64)


def _repeated(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1]


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    key = key.repeat_interleave(_repeated(query, key), 1)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if bias is None else scores + bias


def _attend(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, *how)
    return scores.softmax(-1) @ v.repeat_interleave(_repeated(q, v), 1), scores.logsumexp(-1)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *how: Any
) -> list[Tensor]:
    """Of query, key, value and bias; probabilities come of the log-sum-exp."""
    times = _repeated(q, k)
    scale = how[-1] or 1 / math.sqrt(q.shape[-1])
    scores = _scores(q, k, *how)
    exact = scores.logsumexp(-1)
    lse = lse.to(exact)
    same = torch.allclose(exact, lse)  # which may have the digits of float32
    weights = (scores - (exact if same else lse)[..., None]).exp()
    wide = [t.repeat_interleave(times, 1) for t in (k, v)]
    slope = grad @ wide[1].mT
    inner = weights * (slope - (weights * slope).sum(-1, keepdim=True))
    groups = (k.shape[1], times)
    dk = (inner.mT @ q * scale).unflatten(1, groups).sum(2)
    dv = (weights.mT @ grad).unflatten(1, groups).sum(2)
    return [inner @ wide[0] * scale, dk, dv, inner]


def _cudnn(
    q: Any, k: Any, v: Any, bias: Any, _: Any, p=0.0, causal=False, __=False, *, scale=None
) -> Any:
    out, lse = _attend(q, k, v, bias, causal, scale)
    return out, lse[..., None].float(), None, None, q.shape[2], k.shape[2], SEED, SEED, None


def _cudnn_backward(
    g: Any, q: Any, k: Any, v: Any, _: Any, lse: Any, *rest: Any, scale=None
) -> Any:
    bias, causal = rest[2], rest[8]
    return tuple(_gradients(g, q, k, v, lse[..., 0], bias, causal, scale)[:3])


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, _: Any, p=0.0, causal=False, *, scale=None
) -> Any:
    out, lse = _attend(q, k, v, bias, causal, scale)
    padded = lse.new_zeros(*lse.shape[:2], 32 * math.ceil(lse.shape[2] / 32))
    padded[..., : lse.shape[2]] = lse
    return out, padded.float(), SEED, SEED


def _efficient_backward(
    g: Any, q: Any, k: Any, v: Any, bias: Any, _: Any, lse: Any, *rest: Any, scale=None
) -> Any:
    mask, causal = rest[3], rest[4] if len(rest) > 4 else False
    found = _gradients(g, q, k, v, lse[..., : q.shape[2]], bias, causal, scale)
    return tuple(value if wanted else None for value, wanted in zip(found, mask, strict=True))


def _flash(q: Any, k: Any, v: Any, p=0.0, causal=False, _=False, *, scale=None) -> Any:
    out, lse = _attend(q, k, v, None, causal, scale)
    drawn = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse.float(), None, None, q.shape[2], k.shape[2], *drawn, q.new_zeros(0)


def _flash_backward(
    g: Any, q: Any, k: Any, v: Any, _: Any, lse: Any, *rest: Any, scale=None
) -> Any:
    causal = rest[5]
    return tuple(_gradients(g, q, k, v, lse, None, causal, scale)[:3])


for forward, run, backward in (
    (CUDNN, _cudnn, _cudnn_backward),
    (EFFICIENT, _efficient, _efficient_backward),
    (FLASH, _flash, _flash_backward),
):
    name = forward.default.name().removeprefix("aten::")
    LIBRARY.impl(name, run, "CPU")
    LIBRARY.impl(f"{name}_backward", backward, "CPU")


CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"heads": 6, "groups": 3},
    {"mask": (2, 4, 5, 6)},
    {"mask": (2, 1, 5, 6)},
]


def _operands(
    heads: int = 4, groups: int = 4, mask: tuple[int, ...] | None = None, causal: bool = False
) -> tuple[list[Tensor], Tensor | None, bool]:
    """[batch, heads, queries, width] on [batch, groups, keys, width]."""
    given = [x(2, heads, 5, 3), x(2, groups, 6, 3), x(2, groups, 6, 3)]
    bias = None if mask is None else x(*mask).masked_fill(bools(*mask), -10.0)
    return given, bias, causal


def _calls(kernel: Any, case: dict[str, Any]) -> tuple[Sample, Sample]:
    """A call of a kernel, and that of its backward with its results."""
    given, bias, causal = _operands(**case)
    beside = [] if kernel is FLASH else [bias, True]
    forward = S(*given, *beside, 0.0, causal, tolerance=1e-12)
    out, lse, *rest = kernel(*forward.args)
    grad = x(*out.shape)
    if kernel is EFFICIENT:
        last = [0.0, [True, True, True, bias is not None], causal]
        back = (grad, *given, bias, out, lse, *rest, *last)
    elif kernel is FLASH:
        sequences, drawn = rest[:4], rest[4:6]
        back = (grad, *given, out, lse, *sequences, 0.0, causal, *drawn)
    else:
        sequences, drawn = rest[:4], rest[4:6]
        back = (grad, *given, out, lse, *drawn, bias, *sequences, 0.0, causal)
    return forward, S(*back, tolerance=1e-12)


SAMPLES: dict[Any, list[Sample]] = {}
for kernel in (CUDNN, EFFICIENT, FLASH):
    cases = [case for case in CASES if kernel is not FLASH or "mask" not in case]
    forwards, backwards = zip(*(_calls(kernel, case) for case in cases), strict=True)
    back = getattr(aten, f"{kernel.default.name().removeprefix('aten::')}_backward").default
    SAMPLES |= {kernel.default: list(forwards), back: list(backwards)}
