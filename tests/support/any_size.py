"""fuse as tests want it: tensors in tests are small, and kernels are to run on them all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchard
from torchard.functional.engine.transformed import Transformed

__all__ = ["fuse"]


def fuse(fn: Callable[..., Any], *args: Any, **options: Any) -> Transformed:
    """`torchard.fuse`, with kernels wherever they move fewer bytes, however small the tensors are."""
    return torchard.fuse(fn, *args, **{"prefer": "memory", **options})
