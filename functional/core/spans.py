"""Spans: bytes that are in use from one step of a program to another."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Span", "bytes_at"]


class Span(NamedTuple):
    """The bytes that are in use from one step to another, both included."""

    begin: int
    end: int
    nbytes: int


def bytes_at(spans: Iterable[Span], steps: int) -> list[int]:
    """The bytes in use at each step.

    Args:
        spans: one that begins before step 0 is in use at it; the last may end at step ``steps``.
        steps: their number; where there is none, the list has what is in use before.

    >>> from torchard.functional.core.spans import Span, bytes_at
    >>> bytes_at([Span(-1, 1, 64), Span(1, 2, 128)], 4)
    [64, 192, 128, 0]
    """
    change = [0] * (steps + 2)
    for begin, end, nbytes in spans:
        change[max(begin, 0)] += nbytes
        change[end + 1] -= nbytes
    return list(accumulate(change[: max(steps, 1)]))
