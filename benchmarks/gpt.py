"""A GPT of four layers as a module of PyTorch's, from tokens and targets to a loss, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BATCH", "GPT", "LAYERS", "LENGTH", "batch"]

VOCABULARY, LENGTH, LAYERS, HEADS, BATCH = 256, 64, 4, 4, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # The number of heads is that of the rank, if q, k and v are split.
        q, k, v = (
            f(y).unflatten(-1, (-1, self.depth)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def batch(seed: int = 0, sequences: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(
        VOCABULARY, (2, sequences, length), generator=torch.Generator().manual_seed(seed)
    )
    return x, y
