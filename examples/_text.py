"""Real English text that is on every machine with Python: the help topics of `pydoc`."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor

from torchard import random

__all__ = ["batch_at", "load", "windows"]

HELD_OUT = 0.1


def load() -> tuple[Tensor, Tensor]:
    """The text's bytes, int64 [n]: what to train on, and what is held out."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.tensor(list(text), dtype=torch.int64)
    cut = int(len(data) * (1 - HELD_OUT))
    return data[:cut], data[cut:]


def windows(data: Tensor, starts: Tensor, context: int) -> Tensor:
    """The windows at `starts` [batch]: int64 [batch, context + 1], the last byte the target."""
    return data[starts[:, None] + torch.arange(context + 1)]


def batch_at(data: Tensor, key: Tensor, step: int, size: int, context: int) -> Tensor:
    """The batch of a step, [size, context + 1]: a function of the key and the step alone."""
    starts = random.randint(random.fold_in(key, step), (size,), 0, len(data) - context)
    return windows(data, starts, context)
