"""The models whose memory is measured: functions for one device, with scopes and labels."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from torchard import name, nn, random, scope

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

__all__ = ["Block", "Loss", "Model", "gpt", "mlp"]

Block = Callable[[Any, Tensor], Tensor]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """A loss of parameters and a batch, and values of both.

    Attributes:
        name: its name in the table.
        make: a function that returns the loss, given a function that wraps each of its blocks.
        params: the parameters at which the gradient is taken.
        batch: the batch.
        label: the label of a value in every block.
    """

    name: str
    make: Callable[[Callable[[Block], Block]], Loss]
    params: Any
    batch: Tensor
    label: str

    @property
    def loss(self) -> Loss:
        return self.make(lambda block: block)

    @property
    def arguments(self) -> int:
        """The bytes of the parameters and the batch."""
        leaves: list[Tensor] = optree.tree_leaves((self.params, self.batch))
        return sum(t.numel() * t.element_size() for t in leaves)


# -- residual MLPs ----------------------------------------------------------------------------------


def _mlp_block(p: Any, x: Tensor) -> Tensor:
    up = name(nn.linear(x, p["up_w"], p["up_b"]), "up")
    return name(x + nn.linear(nn.gelu(up, "tanh"), p["down_w"], p["down_b"]), "stream")


def _mlp_loss(wrap: Callable[[Block], Block], params: Any, x: Tensor) -> Tensor:
    block = wrap(_mlp_block)
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = block(p, x)
    with scope("loss"):
        return x.square().mean()


def mlp(width: int, rows: int, layers: int = 8) -> Model:
    """Residual MLPs on x [rows, width]; a block is x + down(gelu(up(x))), four times as wide inside."""
    keys = iter(random.split(random.key(0), 2 * layers + 1).unbind())

    def block() -> dict[str, Tensor]:
        return {
            "up_w": nn.init_normal_fan_in(next(keys), (4 * width, width)),
            "up_b": torch.zeros(4 * width),
            "down_w": nn.init_normal_fan_in(next(keys), (width, 4 * width)),
            "down_b": torch.zeros(width),
        }

    params = [block() for _ in range(layers)]
    x = random.normal(next(keys), (rows, width))
    title = f"MLP, {layers} blocks, width {width}, {rows} rows"
    return Model(title, lambda wrap: functools.partial(_mlp_loss, wrap), params, x, "up")


# -- the GPT of examples/train_gpt.py ---------------------------------------------------------------


def _gpt_loss(
    size: train_gpt.Size, wrap: Callable[[Block], Block], params: Any, batch: Tensor
) -> Tensor:
    """`train_gpt.loss`, with each block wrapped."""

    def plain(p: Any, x: Tensor) -> Tensor:
        norm = train_gpt.norm
        x = name(x + train_gpt.attention(size, p, norm(p["norm1"], x)), "stream")
        return name(x + train_gpt.mlp(p, norm(p["norm2"], x)), "stream")

    block, context = wrap(plain), batch[:, :-1]
    with scope("embedding"):
        places = params["positions"][: context.shape[1]]
        x = name(nn.embedding(params["embedding"], context) + places, "stream")
    for i, p in enumerate(params["blocks"]):
        with scope(f"block/{i}"):
            x = block(p, x)
    with scope("head"):
        logits = nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])
    with scope("loss"):
        return nn.cross_entropy(logits, batch[:, 1:])


def gpt(size: train_gpt.Size, rows: int) -> Model:
    """The byte-level GPT, on random bytes."""
    params = train_gpt.init(size, random.key(0))
    batch = random.randint(random.key(1), (rows, size.context + 1), 0, 256)
    title = f"GPT, {size.layers} layers, width {size.width}, {rows} × {size.context} bytes"
    return Model(
        title, lambda wrap: functools.partial(_gpt_loss, size, wrap), params, batch, "stream"
    )
