"""A byte-level language model: an embedding and an MLP over a window of context. Plain functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from _text import BYTES
from torch import Tensor

from torchard import nn, random

__all__ = ["Size", "init", "logits", "loss"]

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How big the model is.

    Attributes:
        context: how many bytes it sees.
        embed: numbers for each of them.
        width: of the residual stream.
        hidden: of each MLP.
        blocks: how many MLPs.
    """

    context: int = 16
    embed: int = 32
    width: int = 256
    hidden: int = 512
    blocks: int = 2


def init(key: Tensor, size: Size) -> Params:
    """Parameters, the same for the same key."""
    keys = iter(random.split(key, 2 + 2 * size.blocks).unbind())
    ins = [size.context * size.embed] + [size.width] * (size.blocks - 1)
    return {
        "embed": nn.init_normal(next(keys), (BYTES, size.embed), 1.0),
        "blocks": [
            {
                "up": _linear(next(keys), size.hidden, n, 1.4),
                "down": _linear(next(keys), size.width, size.hidden, 1.0),
            }
            for n in ins
        ],
        "out": _linear(next(keys), BYTES, size.width, 0.1),
    }


def _linear(key: Tensor, out: int, into: int, gain: float) -> Params:
    return {"w": nn.init_normal_fan_in(key, (out, into), gain), "b": torch.zeros(out)}


def mlp(params: Params, x: Tensor) -> Tensor:
    """[..., in] -> [..., width]."""
    hidden = nn.gelu(nn.linear(x, params["up"]["w"], params["up"]["b"]))
    return nn.linear(hidden, params["down"]["w"], params["down"]["b"])


def logits(params: Params, context: Tensor) -> Tensor:
    """Bytes [batch, context] -> [batch, 256]: what the next byte may be."""
    x = nn.embedding(params["embed"], context).flatten(-2)
    first, *rest = params["blocks"]
    x = mlp(first, x)
    for block in rest:
        x = x + mlp(block, x)
    return nn.linear(x, params["out"]["w"], params["out"]["b"])


def loss(params: Params, batch: Tensor) -> Tensor:
    """Mean nats per byte: batch int64 [batch, context + 1], the last byte of each the target."""
    return nn.cross_entropy(logits(params, batch[:, :-1]), batch[:, -1])
