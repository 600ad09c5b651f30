"""Traces of real ranks: what `gloo.py` runs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traces

from torchard import Mesh

__all__ = ["CHECKS"]


def names_in_a_trace(rank: int, world: int) -> dict[str, traces.Found]:
    """Two ranks are enough."""
    if world != 2:
        return {}
    mesh = Mesh({"tp": world})
    return {case: traces.found(case, mesh) for case in traces.CASES}


CHECKS: dict[str, Callable[[int, int], Any]] = {"names_in_a_trace": names_in_a_trace}
