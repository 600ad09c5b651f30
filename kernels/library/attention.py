"""Attention that is written out, run by torch's own, which need not store the weights [s, t].

Source: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135) for the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.patterns.kernel import Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern

__all__ = ["WEIGHTS", "Weights", "attention", "attention_causal", "attention_masked"]

_WHOLE = "| whole t d"
_DIMS = "b h s d, b h t d, b h t e"


def _weights(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.softmax(scores, -1)


def _weights_wide(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax in float32 and then rounded, as in HuggingFace."""
    return torch.softmax(scores, -1, dtype=torch.float32).to(dtype)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))


Weights = Callable[[Tensor, torch.dtype], Tensor]


def _plain(weights: Weights) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weights(_scores(q, k), q.dtype) @ v

    return attention


def _causal(weights: Weights, masked: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weights(masked(_scores(q, k)), q.dtype) @ v

    return attention_causal


def _masked(weights: Weights) -> Callable[..., Tensor]:
    def attention_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return weights(_scores(q, k) + mask, q.dtype) @ v

    return attention_masked


def _below(scores: Tensor) -> Tensor:
    kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~kept, -math.inf)


def _above(scores: Tensor) -> Tensor:
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(ones.triu(1), -math.inf)


def _added(scores: Tensor) -> Tensor:
    shape = scores.shape[-2:]
    return scores + torch.full(shape, -math.inf, dtype=scores.dtype, device=scores.device).triu(1)


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def _run_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _vjp(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients by torch's own backward, which recomputes the weights that it needs."""

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        *operands, cotangent = given
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in operands]
            out = run(*inputs)
        return torch.autograd.grad(out, inputs, cotangent)

    return gradients


def _register(name: str, run: Callable[..., Tensor], patterns: list[Pattern]) -> Kernel:
    dims = f"{_DIMS} -> b h s e {_WHOLE}"
    implementations: dict[str, Callable[..., Any]] = {"any": run}
    vjp = {"any": _vjp(run)}
    return register_kernel(Kernel(name, tuple(patterns), dims, implementations, vjp))


def _patterns(name: str, functions: list[Callable[..., Tensor]], more: str = "") -> list[Pattern]:
    dims = f"{_DIMS}{more} -> b h s e {_WHOLE}"
    return [Pattern(fn, dims, name=name) for fn in functions]


WEIGHTS = (_weights, _weights_wide)
attention = _register("attention", _run, _patterns("attention", [_plain(w) for w in WEIGHTS]))
# Row i attends to keys 0 to i, as with torch's is_causal, whatever the numbers of rows and keys.
attention_causal = _register(
    "attention_causal",
    _run_causal,
    [
        pattern
        for masked in (_below, _above, _added)
        for pattern in _patterns("attention_causal", [_causal(w, masked) for w in WEIGHTS])
    ],
)
# A row whose mask is -inf everywhere is 0 here, and NaN where attention is written out.
attention_masked = _register(
    "attention_masked",
    _run,
    [
        pattern
        for mask in ("s t", "1 1 s t", "b 1 s t", "b h s t")
        for pattern in _patterns("attention_masked", [_masked(w) for w in WEIGHTS], f", {mask}")
    ],
)
