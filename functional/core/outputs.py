"""What a function or a node gives: one value, or several."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["several", "tensors_of"]


def several(value: Any) -> list[Any]:
    """The items of a tuple or list; a value alone is one of one."""
    return list(value) if isinstance(value, (tuple, list)) else [value]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among them."""
    return [v for v in several(value) if isinstance(v, torch.Tensor)]
