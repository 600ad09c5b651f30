"""Which torch the tests run on, where they must know."""

from __future__ import annotations

import re

import torch

__all__ = ["TORCH"]

TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
