"""Attention, written out, as torch's own: weights [s, t] are never stored whole.

Source: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135) for how it runs.
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

__all__ = ["attention", "attention_causal", "attention_masked"]

_WHOLE = "| whole t d"
_DIMS = "b h s d, b h t d, b h t e"


def _weights(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.softmax(scores, -1)


def _weights_wide(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded after softmax, as HuggingFace does."""
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
    """By torch's own backward, which computes what it needs of the weights again."""

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        *operands, cotangent = given
        with torch.enable_grad():
            moving = [x.detach().requires_grad_() for x in operands]
            out = run(*moving)
        return torch.autograd.grad(out, moving, cotangent)

    return gradients


def _register(name: str, run: Callable[..., Tensor], patterns: list[Pattern]) -> Kernel:
    dims = f"{_DIMS} -> b h s e {_WHOLE}"
    implementations: dict[str, Callable[..., Any]] = {"any": run}
    given = {"any": _vjp(run)}
    return register_kernel(Kernel(name, tuple(patterns), dims, implementations, given))


def _patterns(name: str, made: list[Callable[..., Tensor]], more: str = "") -> list[Pattern]:
    dims = f"{_DIMS}{more} -> b h s e {_WHOLE}"
    return [Pattern(fn, dims, name=name) for fn in made]


_WAYS = (_weights, _weights_wide)
attention = _register("attention", _run, _patterns("attention", [_plain(w) for w in _WAYS]))
# Masks start at the first key, as torch's own does; rows and columns are of one length there.
attention_causal = _register(
    "attention_causal",
    _run_causal,
    [
        pattern
        for masked in (_below, _above, _added)
        for pattern in _patterns("attention_causal", [_causal(w, masked) for w in _WAYS])
    ],
)
# A row whose mask is -inf everywhere has no weights: it is 0 here, and nan written out.
attention_masked = _register(
    "attention_masked",
    _run,
    [
        pattern
        for mask in ("s t", "1 1 s t", "b 1 s t", "b h s t")
        for pattern in _patterns("attention_masked", [_masked(w) for w in _WAYS], f", {mask}")
    ],
)
