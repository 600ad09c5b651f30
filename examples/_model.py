"""A byte-level language model, as plain functions: an embedding and MLPs over a window of bytes."""

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
    """The sizes of the model.

    Attributes:
        context: the number of bytes that it sees.
        embed: the width of the embedding of a byte.
        width: the width of the residual stream.
        hidden: the hidden width of each MLP.
        blocks: the number of MLPs.
    """

    context: int = 16
    embed: int = 32
    width: int = 256
    hidden: int = 512
    blocks: int = 2


def init(key: Tensor, size: Size) -> Params:
    """The initial parameters, a function of the key."""
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
    """An MLP: [..., in] -> [..., width]."""
    hidden = nn.gelu(nn.linear(x, params["up"]["w"], params["up"]["b"]))
    return nn.linear(hidden, params["down"]["w"], params["down"]["b"])


def logits(params: Params, context: Tensor) -> Tensor:
    """The logits [batch, 256] of the next byte, from bytes [batch, context]."""
    x = nn.embedding(params["embed"], context).flatten(-2)
    first, *rest = params["blocks"]
    x = mlp(first, x)
    for block in rest:
        x = x + mlp(block, x)
    return nn.linear(x, params["out"]["w"], params["out"]["b"])


def loss(params: Params, batch: Tensor) -> Tensor:
    """The mean loss in nats of windows int64 [batch, context + 1], whose last bytes are the targets."""
    return nn.cross_entropy(logits(params, batch[:, :-1]), batch[:, -1])
