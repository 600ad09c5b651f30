"""Real English text that comes with Python: the help topics of `pydoc`."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchard import random

__all__ = ["BYTES", "batch_at", "generate", "load", "windows"]

BYTES = 256
HELD_OUT = 0.1


def load() -> tuple[Tensor, Tensor]:
    """The bytes of the text, int64 [n]: those to train on, and those held out."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.tensor(list(text), dtype=torch.int64)
    cut = int(len(data) * (1 - HELD_OUT))
    return data[:cut], data[cut:]


def windows(data: Tensor, starts: Tensor, context: int) -> Tensor:
    """The windows at `starts` [batch], int64 [batch, context + 1]."""
    return data[starts[:, None] + torch.arange(context + 1)]


def batch_at(data: Tensor, key: Tensor, step: int, size: int, context: int) -> Tensor:
    """The batch of a step, [size, context + 1], which depends only on the key and the step."""
    starts = random.randint(random.fold_in(key, step), (size,), 0, len(data) - context)
    return windows(data, starts, context)


def generate(
    predict: Callable[[Any, Tensor], Tensor],
    params: Any,
    key: Tensor,
    start: bytes,
    count: int,
    heat: float = 0.7,
) -> bytes:
    """`count` bytes that a model generates after `start`, drawn at temperature `heat`.

    Args:
        predict: a function of the parameters and bytes [1, len(start)] to logits [1, 256] of the next.
    """
    context = torch.tensor(list(start), dtype=torch.int64)
    generated = bytearray()
    # Gumbel's trick: the largest of logits + noise is a draw from their softmax.
    noise = -torch.log(-torch.log(random.uniform(key, (count, BYTES)).clamp_min(1e-20)))
    for gumbel in noise:
        byte = (predict(params, context[None])[0] / heat + gumbel).argmax()
        generated.append(int(byte))
        context = torch.cat([context[1:], byte[None]])
    return bytes(generated)
