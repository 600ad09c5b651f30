"""Functions that no trace takes, or not as they are: branches, masks, draws, writes, old-style ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CACHE", "FUNCTIONS", "OldStyle", "branched"]


class OldStyle(torch.autograd.Function):
    """x * x, as Functions were written before setup_context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * g * ctx.saved_tensors[0]


def written(x: torch.Tensor) -> Any:
    y = x * 1
    y[:, 0] += 1
    rows = y.view(-1)
    rows.mul_(2)
    y[y > 0] = 0
    y[1:].unsqueeze_(0).exp_()
    return y.sum(0), rows


def branched(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x.cos() * float(x.mean())


def selected(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].square().sum() + torch.masked_select(x, x < 0.5).sum() * x.unique().mean()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3) + torch.rand_like(x) * x + torch.empty(6, dtype=x.dtype).uniform_() * x


NORM = nn.BatchNorm1d(6, dtype=torch.float64)
LSTM = nn.GRU(6, 3, dtype=torch.float64)
CACHE: dict[str, torch.Tensor] = {}


def cached(x: torch.Tensor) -> torch.Tensor:
    if "angles" not in CACHE:
        CACHE["angles"] = torch.arange(6, dtype=x.dtype).cos()
    return x * CACHE["angles"]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "writes": written,
    "branch": branched,
    "masks": selected,
    "draws": drawn,
    "old-style Function": OldStyle.apply,
    "batch norm": NORM,
    "recurrent": lambda x: LSTM(x)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "complex": lambda x: torch.fft.fft(x).conj().abs(),
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(0))(x),
    "views": lambda x: torch.cat(
        [c.exp() for c in x.unfold(1, 4, 2).transpose(0, 2).chunk(2, 1)], 1
    ),
    "a cache": cached,
    "inner gradient": lambda x: torch.autograd.grad(
        (y := x.detach().requires_grad_()).sin().sum(), y
    )[0],
}
