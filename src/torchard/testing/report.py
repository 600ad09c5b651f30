"""The result of a comparison of two functions, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    *("DerivativeReport", "Difference", "Differs", "OrderReport", "Report", "Trials"),
    "is_assertion",
]


@dataclass(frozen=True)
class Difference:
    """One compared value.

    Attributes:
        path: where it is: ``out['logits']``, ``gradient of args[0]['w']``.
        kind: its dtype, or its type if it is not a tensor.
        error: the largest absolute error against the exact value.
        bound: the largest error that rounding explains, at the element that most exceeds its bound.
        excess: the error of that element over its bound; up to 1, rounding explains it.
        at: the index of that element.
        problem: why the values cannot be compared, if they cannot; this counts as a difference.
        skipped: why they are not compared, if torch has no such derivative; this is not a difference.

    >>> import torch
    >>> from torchard.testing import Difference
    >>> row = Difference("out", torch.float32, error=3e-3, bound=1e-6, excess=3e3, at=(0, 2))
    >>> row.good
    False
    >>> print(row)
    out  float32  3.00e-03  1.00e-06  <-- at [0, 2], 3e+03 times its bound
    """

    path: str
    kind: torch.dtype | type
    error: float = 0.0
    bound: float = 0.0
    excess: float = 0.0
    at: tuple[int, ...] = ()
    problem: str = ""
    skipped: str = ""

    @property
    def good(self) -> bool:
        """Whether rounding explains the difference."""
        return not self.problem and self.excess <= 1

    def __str__(self) -> str:
        return "  ".join(self.cells).rstrip()

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table."""
        kind = (
            self.kind.__name__ if isinstance(self.kind, type) else str(self.kind)[len("torch.") :]
        )
        if self.skipped:
            return self.path, "", "", "", f"not compared: {self.skipped}"
        if self.problem:
            place = f"at {list(self.at)}, " if self.at else ""
            return self.path, kind, "", "", f"<-- {place}{self.problem}"
        times = f"{self.excess:.3g} times its bound" if self.bound else "where nothing is rounded"
        if self.bound == math.inf:
            times = "where roundings make it infinite or NaN, so that there is no bound"
        note = "" if self.good else f"<-- at {list(self.at)}, {times}"
        return self.path, kind, f"{self.error:.2e}", f"{self.bound:.2e}", note


class Report(list[Difference]):
    """All compared values; prints as a table.

    Args:
        iterable: the differences.

    >>> import torch
    >>> from torchard.testing import Report, equal
    >>> report = equal(torch.sin, torch.sin, torch.zeros(2), orders=["value"])
    >>> isinstance(report, Report), report.good
    (True, True)
    >>> print(report)
    value  dtype    error     bound
    out    float32  0.00e+00  0.00e+00
    """

    def __add__(self, other: Iterable[Difference]) -> Report:  # type: ignore[override]  # a list's gives lists
        return Report([*self, *other])

    @property
    def good(self) -> bool:
        """Whether rounding explains all differences."""
        return all(row.good for row in self)

    def __str__(self) -> str:
        table = [("value", "dtype", "error", "bound", ""), *(row.cells for row in self)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table)
        return "\n".join(line.rstrip() for line in lines)


def is_assertion(caught: Any) -> bool:
    """Whether pytest hides a frame of this library's: a failing law is shown at the user's line."""
    return issubclass(caught.type, AssertionError)


class Differs(AssertionError):
    """Two functions differ. Where they differ is computed only when the message is read; shrinking never
    reads it.

    Args:
        report: the comparisons.
        where: returns, as text, where the two sides first differ.

    Attributes:
        report: the report of the comparison.
        heading: the message's first line.

    >>> import torch
    >>> from torchard.testing import Differs, equal
    >>> try:
    ...     equal(torch.sin, torch.cos, torch.ones(2), orders=["value"])
    ... except Differs as error:
    ...     print([row.path for row in error.report])
    ['out']
    """

    def __init__(self, report: Report, where: Callable[[], str]) -> None:
        super().__init__()
        self.report, self.heading = report, "fn differs from its reference:"
        self._find: Callable[[], str] | None = where
        self._where = ""

    def inside(self, what: str) -> Differs:
        """The same error, with a heading that begins with the attempt."""
        self.heading = f"{what}{self.heading}"
        return self

    def __str__(self) -> str:
        if self._find is not None:
            find, self._find = self._find, None
            try:
                self._where = find()
            except Exception as error:  # the report is complete without it
                self._where = f"where they first differ was not found: {type(error).__name__}"
        return "\n".join(filter(None, (self.heading, str(self.report), self._where)))


@dataclass(frozen=True)
class Trials:
    """The attempts of `monotone` or `check_training`, all of which passed.

    Attributes:
        count: how many steps of the arguments were tried, or how many leaves are trained.
        what: a description of these.

    >>> import torch
    >>> from torchard.testing import Trials, monotone
    >>> found = monotone(torch.sigmoid, torch.zeros(3), draws=1)
    >>> isinstance(found, Trials), found.count
    (True, 20)
    >>> print(found)
    20 steps of 3 elements, by up to 0.001, 0.1, 1 and 10 of one plus their size: no result falls
    """

    count: int
    what: str

    def __str__(self) -> str:
        return f"{self.count} {self.what}"


@dataclass(frozen=True)
class OrderReport:
    """The comparisons of one order of derivatives.

    Attributes:
        order: the order of the derivatives.
        forward: whether forward mode was compared, with finite differences.
        reverse: whether reverse mode was compared: with forward mode, or else with finite differences.
        no_forward: why forward mode was not compared although this was requested.
        kinks: the number of elements at a kink or a jump, whose derivative is not the mean of both sides.
        unknown: the number of elements whose derivative no finite differences determine.
        beside: whether the same was also compared at nearby arguments, away from the kinks.
        missing: why this order was not compared: torch has no such derivative of fn.

    >>> from torchard.testing import OrderReport
    >>> print(OrderReport(1, forward=False, reverse=True, kinks=2))
    order 1: reverse mode against finite differences; 2 elements at kinks or jumps
    """

    order: int
    forward: bool
    reverse: bool
    no_forward: str = ""
    kinks: int = 0
    missing: str = ""
    unknown: int = 0
    beside: bool = False

    def __str__(self) -> str:
        if self.missing:
            return f"order {self.order}: not compared: {self.missing}"
        compared = ["forward mode against finite differences"] if self.forward else []
        if self.reverse:
            other = "forward mode" if self.forward else "finite differences"
            compared.append(f"reverse mode against {other}")
        text = f"order {self.order}: {', '.join(compared)}"
        if self.no_forward:
            text += f"; no forward mode: {self.no_forward}"
        if self.kinks:
            text += f"; {self.kinks} element{'s' * (self.kinks > 1)} at kinks or jumps"
        if self.unknown:
            text += f"; {self.unknown} element{'s' * (self.unknown > 1)} without finite differences"
        if self.beside:
            text += "; also compared near these arguments"
        return text


class DerivativeReport(list[OrderReport]):
    """The comparisons of `check_derivatives`; it prints as a line for each order.

    Args:
        iterable: the comparisons of each order.

    >>> import torch
    >>> from torchard.testing import DerivativeReport, check_derivatives
    >>> report = check_derivatives(torch.sin, torch.ones(3), order=1)
    >>> isinstance(report, DerivativeReport)
    True
    >>> print(report)
    order 1: forward mode against finite differences, reverse mode against forward mode
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self))
