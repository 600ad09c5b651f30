"""Axis expressions: names for the dims of some arrays, as text: ``"b (h d), d -> b h d | whole d"``.

    expression := operands ["->" operands] {"|" clause}
    operands   := [operand {"," operand}]
    operand    := {dim} [":" name]                     a name after a colon is a dtype
    dim        := axis | "(" axis {axis} ")" | "..."   a product of axes, the outermost first
    axis       := name ["=" number] | number           a number is an axis of that size
    clause     := name {name | number | "..." | ".0"}  ".0" is the last dim of an ellipsis, ".1" the next

This module has the grammar only. Its callers define the meaning of a dim, a clause or an ellipsis, and
refuse those they do not support, with the position in the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

__all__ = [
    "Axis",
    "AxisExpression",
    "AxisExpressionError",
    "Clause",
    "DimExpression",
    "OperandExpression",
    "Word",
    "parse",
]

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)(?!\w)|(?P<mark>->|\.\.\.|\.\d+|[(),:|=]))"
)


class AxisExpressionError(ValueError):
    """An invalid axis expression. A line of the message points at the position."""

    def __init__(self, text: str, at: int, reason: str) -> None:
        lines = (text, " " * at + "^") if "\n" not in text else (text,)
        super().__init__("\n    ".join((reason, *lines)))


@dataclass(frozen=True)
class Word:
    """A name, a number or a mark, and its position in the text."""

    text: str
    at: int

    @property
    def is_number(self) -> bool:
        return self.text.isdecimal()


@dataclass(frozen=True)
class Axis:
    """An axis: its name, and its size if given."""

    name: str
    size: int | None
    at: int


@dataclass(frozen=True)
class DimExpression:
    """A dim: one axis, or the product of several; an ellipsis (of any number of dims) has none."""

    axes: tuple[Axis, ...]
    at: int

    @property
    def is_ellipsis(self) -> bool:
        return not self.axes

    @property
    def name(self) -> str:
        """The dim as written, without brackets and sizes."""
        return " ".join(axis.name for axis in self.axes) or "..."


@dataclass(frozen=True)
class OperandExpression:
    """The dims of one array, at most one of them an ellipsis, and its dtype if given."""

    dims: tuple[DimExpression, ...]
    dtype: Word | None
    at: int

    @property
    def ellipsis(self) -> int | None:
        """The index of the dim that is an ellipsis; None if there is none."""
        return next((i for i, dim in enumerate(self.dims) if dim.is_ellipsis), None)


@dataclass(frozen=True)
class Clause:
    """A clause after a ``|``: a verb and its words."""

    verb: Word
    words: tuple[Word, ...]


@dataclass(frozen=True)
class AxisExpression:
    """An axis expression: operands, results (None without an arrow) and clauses."""

    text: str
    operands: tuple[OperandExpression, ...]
    results: tuple[OperandExpression, ...] | None
    clauses: tuple[Clause, ...]

    @property
    def arrays(self) -> tuple[OperandExpression, ...]:
        """Operands and results."""
        return (*self.operands, *(self.results or ()))

    def axes(self) -> Iterator[Axis]:
        """All axes from left to right, with repetitions."""
        return (axis for array in self.arrays for dim in array.dims for axis in dim.axes)

    def fail(self, place: Word | Axis | DimExpression | OperandExpression | int, reason: str) -> NoReturn:
        """Raise AxisExpressionError for something in the text, or a position in it."""
        raise AxisExpressionError(self.text, place if isinstance(place, int) else place.at, reason)


@functools.cache
def parse(text: str) -> AxisExpression:
    """Parse an axis expression.

    Raises:
        AxisExpressionError: it is invalid; points at the first error.
    """
    return _Parser(text).expression()


class _Parser:
    """A recursive-descent parser; ``next`` is the next word, empty at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = self._words()
        self.next = next(self.words)

    def _words(self) -> Iterator[Word]:
        at = 0
        end = len(self.text.rstrip())
        while at < end:
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                self.fail(Word(self.text[at], at), f"unexpected {self.text[at]!r}")
            yield Word(match[match.lastgroup or 0], match.start(match.lastgroup or 0))
            at = match.end()
        yield Word("", end)

    def fail(self, word: Word, reason: str) -> NoReturn:
        raise AxisExpressionError(self.text, word.at, reason)

    def missing(self, wanted: str) -> NoReturn:
        here = repr(self.next.text) if self.next.text else "the end"
        self.fail(self.next, f"{wanted} is expected here, not {here}")

    def take(self) -> Word:
        word = self.next
        self.next = next(self.words, word)
        return word

    def took(self, mark: str) -> bool:
        """Take a mark if it comes next; return whether it did."""
        return self.next.text == mark and bool(self.take())

    def name(self, wanted: str) -> Word:
        if not self.next.text.isidentifier():
            self.missing(wanted)
        return self.take()

    def expression(self) -> AxisExpression:
        operands = self.operands()
        results = self.operands() if self.took("->") else None
        clauses = []
        while self.took("|"):
            clauses.append(self.clause())
        if self.next.text:
            again = " a second time" if self.next.text == "->" else ""
            self.fail(self.next, f"unexpected {self.next.text!r}{again}")
        return AxisExpression(self.text, operands, results, tuple(clauses))

    def operands(self) -> tuple[OperandExpression, ...]:
        """The operands between commas. One may have no dims (a scalar); an empty text has no operands."""
        operands = [self.operand()]
        while self.took(","):
            operands.append(self.operand())
        empty = len(operands) == 1 and not operands[0].dims and operands[0].dtype is None
        return () if empty else tuple(operands)

    def operand(self) -> OperandExpression:
        at, dims = self.next.at, list[DimExpression]()
        while self.next.text in ("(", "...") or self._is_axis():
            dims.append(self.dim())
        twice = [dim for dim in dims if dim.is_ellipsis][1:]
        if twice:
            self.fail(Word("...", twice[0].at), "a second '...' in one operand")
        dtype = self.name("a dtype") if self.took(":") else None
        return OperandExpression(tuple(dims), dtype, at)

    def _is_axis(self) -> bool:
        return self.next.text.isidentifier() or self.next.is_number

    def dim(self) -> DimExpression:
        at = self.next.at
        if self.took("..."):
            return DimExpression((), at)
        if not self.took("("):
            return DimExpression((self.axis(),), at)
        axes = [self.axis()]
        while self._is_axis():
            axes.append(self.axis())
        if not self.took(")"):
            self.missing("')'")
        return DimExpression(tuple(axes), at)

    def axis(self) -> Axis:
        if self.next.is_number:
            word = self.take()
            return Axis(word.text, int(word.text), word.at)
        word = self.name("the name of an axis")
        return Axis(word.text, self.number() if self.took("=") else None, word.at)

    def number(self) -> int:
        if not self.next.is_number:
            self.missing("a size")
        return int(self.take().text)

    def clause(self) -> Clause:
        verb, words = self.name("a clause"), list[Word]()
        while self._is_axis() or self.next.text.startswith("."):
            words.append(self.take())
        return Clause(verb, tuple(words))
