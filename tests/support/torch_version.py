"""Which torch the tests run on, where they must know."""

from __future__ import annotations

import torch
from matrix import numbers

__all__ = ["TORCH"]

TORCH = numbers(torch.__version__)
