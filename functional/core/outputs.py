"""The outputs of a function or a node: one value, or a sequence of values."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["outputs_of", "tensors_of"]


def outputs_of(value: Any) -> list[Any]:
    """The items of a tuple or list; a list of one for any other value."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among the outputs."""
    return [v for v in outputs_of(value) if isinstance(v, torch.Tensor)]
