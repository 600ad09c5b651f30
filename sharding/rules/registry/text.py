"""Spelling of factor rules: names of dims, and the text of an operand."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["letters", "spell"]


def letters(n: int) -> list[str]:
    """Names for n dims."""
    return [f"d{i}" for i in range(n)]


def spell(dims: Sequence[str]) -> str:
    """The text of an operand with these dims."""
    return " ".join(dims)
