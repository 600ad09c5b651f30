"""Small models with infinities inside, of square scores and of how far their mask is shifted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

__all__ = ["DTYPES", "MASKED", "MISTAKES", "Model", "of_rows", "rows"]

Model = Callable[[torch.Tensor, int], torch.Tensor]
Fn = Callable[[torch.Tensor], torch.Tensor]
INF = float("inf")
SEED = 4  # by which each mistake is larger than the roundings of bfloat16
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _later(s: torch.Tensor, shift: int) -> torch.Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + shift)


def _causal(s: torch.Tensor, shift: int, value: float = -INF) -> torch.Tensor:
    return s.masked_fill(_later(s, shift), value)


def _added(s: torch.Tensor, shift: int) -> torch.Tensor:
    return s + torch.zeros(s.shape[-2:], dtype=s.dtype).masked_fill(_later(s, shift), -INF)


def _scattered(s: torch.Tensor, shift: int, start: float, reduce: str) -> torch.Tensor:
    into = torch.tensor([0, 2, 2, 0]).add(shift).expand(s.shape)  # no one writes columns 1 and 3
    return torch.full_like(s, start).scatter_reduce(-1, into, s, reduce)


MASKED: dict[str, Model] = {
    "masked_fill": lambda s, k: _causal(s, k).softmax(-1),
    "where": lambda s, k: torch.where(_later(s, k), -INF, s).softmax(-1),
    "an added mask": lambda s, k: _added(s, k).logsumexp(-1),
    "attention": lambda s, k: F.scaled_dot_product_attention(s, s, s, attn_mask=~_later(s, k)),
    "a row without values": lambda s, k: _causal(s, k - 1).softmax(-1),
    "infinite results": lambda s, k: _causal(s.tanh(), k),
    "amax": lambda s, k: (s - _causal(s, k).amax(-1)).exp(),
    "max with its place": lambda s, k: _causal(s, k).max(-1).values.tanh(),
    "padding of a maximum": lambda s, k: F.pad(s.roll(k, -1), (0, 2), value=-INF)[..., 1:].amax(-1),
    "maximum": lambda s, k: torch.maximum(_causal(s, k), s.flip(-1) - 1).exp(),
    "minimum": lambda s, k: torch.minimum(_causal(s, k, INF), s.flip(-1) + 1).exp(),
    "scatter_reduce amax": lambda s, k: _scattered(s, k, -INF, "amax").exp(),
    "scatter_reduce amin": lambda s, k: (-_scattered(s, k, INF, "amin")).exp(),
    "rows of infinities": lambda s, k: (
        torch.cat([s, torch.full_like(s, -INF)], -2).index_select(-2, torch.tensor([k, 2, 5])).exp()
    ),
    "sort": lambda s, k: _causal(s, k).sort(-1).values.exp(),
    "topk": lambda s, k: _causal(s, k).topk(3, -1).values.exp(),
    "cummax": lambda s, k: _causal(s, k).cummax(-1).values.exp(),
    "clamp": lambda s, k: _causal(s, k).clamp(min=-1, max=INF).sin(),
    "logcumsumexp": lambda s, k: _causal(s, k).logcumsumexp(-1),
}


def of_rows(model: Model, mistake: str = "") -> Fn:
    """The model of the scores that rows have with their neighbours', with a mistake if asked for."""
    factor, sign, shift = MISTAKES.get(mistake, (1.0, 1.0, 0))

    def of_scores(x: torch.Tensor) -> torch.Tensor:
        out = model(x @ x.roll(1, 0).mT * (sign / 4), shift)
        return out if factor == 1 else factor * out

    return of_scores


# A factor of the result, a factor of the scores, and how far the mask is shifted.
MISTAKES = {
    "seven times": (7.0, 1.0, 0),
    "negated scores": (1.0, -1.0, 0),
    "a shifted mask": (1.0, 1.0, 1),
}


def rows(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows of distinct random numbers, four of them."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(SEED)).to(dtype)
