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
        spans: the spans. A span that begins before step 0 is in use at step 0; it may end at ``steps``.
        steps: the number of steps; if it is 0, the list has the bytes in use before any step.

    >>> from torchard.functional.core.spans import Span, bytes_at
    >>> bytes_at([Span(-1, 1, 64), Span(1, 2, 128)], 4)
    [64, 192, 128, 0]
    """
    change = [0] * (steps + 2)
    for begin, end, nbytes in spans:
        change[max(begin, 0)] += nbytes
        change[end + 1] -= nbytes
    return list(accumulate(change[: max(steps, 1)]))
