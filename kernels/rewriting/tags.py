"""Tags that only kernels use: see functional/programs/tagging.py."""

from __future__ import annotations

from typing import Any

from torchard.functional.programs.tagging import Tag, declare

__all__ = ["FUSE"]

FUSE: Tag[tuple[Any, ...]] = declare(
    "fuse",
    "the rewrites of calls of fuse that it was traced in",
    written_by="fuse",
    read_by="fuse",
    follows="place",
)
