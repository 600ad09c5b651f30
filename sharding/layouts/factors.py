"""Factor rules: one line that states how an operation can be split.

After Shardy's sharding rules (https://openxla.org/shardy), in einops' spelling: an axis expression
(``axis_expressions.py``) whose axes are the factors that an operation's dims are made of. What can be in
a rule is in the docstring of `torchard.register_rule`, with an example each.

Parsing is cached by the text, instantiation by the shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torchard.functional.core.axis_expressions import (
    Axis,
    AxisExpression,
    AxisExpressionError,
    Clause,
    DimExpression,
    OperandExpression,
    Word,
    parse,
)

__all__ = ["Rule", "RuleError", "gathering_rule", "instantiate"]

OperandShapes = tuple[tuple[int, ...], ...]
REDUCTIONS = ("sum", "max", "min")
Factors = tuple[int, ...]  # the factors of one dim, outermost first


class RuleError(ValueError):
    """A factor rule that cannot be parsed or does not fit the shapes."""


@dataclass(frozen=True)
class Rule:
    """A factor rule for given shapes.

    Attributes:
        sizes: the size of each factor.
        ins, outs: for every operand and result, the factors of each dim.
        whole: factors that may not be split.
        combine: factors that are on no result, and the reduction that joins partial results.
        linear: sets of operands in which the operation is jointly linear.
        index: factors made here, of which each coordinate can make its own part.
        run: factors that are split as one dim or not at all.
        ties: pairs of a dim and its blocks, split together, one block a rank.
        halo: the blocks between which the operation itself moves data: their factor, that of a block's
            elements, and how many of these the busiest rank sends or receives.
        gathered: True for the rule of last resort.
    """

    sizes: tuple[int, ...]
    ins: tuple[tuple[Factors, ...], ...]
    outs: tuple[tuple[Factors, ...], ...]
    whole: frozenset[int] = frozenset()
    combine: tuple[tuple[int, str], ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    index: frozenset[int] = frozenset()
    run: frozenset[int] = frozenset()
    gathered: bool = False
    names: tuple[str, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    halo: tuple[int, int, int] | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.ins, self.outs, self.whole, self.combine, self.linear))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def combiner(self) -> dict[int, str]:
        return dict(self.combine)

    @functools.cached_property
    def on_result(self) -> frozenset[int]:
        return frozenset(f for out in self.outs for dim in out for f in dim)


class _Builder:
    """Gives numbers to names, and sizes to both.

    Attributes:
        alone: the sizes of factors that some dim consists of; a product elsewhere is sized by them.
    """

    def __init__(self, text: AxisExpression) -> None:
        self.text = text
        self.ids: dict[str, int] = {}
        self.sizes: list[int | None] = []
        self.alone: dict[str, int] = {}

    def number(self, name: str, size: int | None) -> int:
        known = self.ids.setdefault(name, len(self.sizes))
        if known == len(self.sizes):
            self.sizes.append(size)
        return known

    def factor(self, axis: Axis, size: int | None) -> int:
        known = self.number(axis.name, size)
        if size is not None:
            if self.sizes[known] not in (None, size):
                self.text.fail(axis, f"factor {axis.name} is {self.sizes[known]} and {size}")
            self.sizes[known] = size
        return known

    def dim(self, dim: DimExpression, size: int) -> Factors:
        if dim.name == "1":
            if size != 1:
                self.text.fail(dim, f"the dim is {size}, not 1")
            return ()
        if len(dim.axes) == 1 and dim.axes[0].size is None:
            return (self.factor(dim.axes[0], size),)
        sizes = [self.alone.get(a.name) if a.size is None else a.size for a in dim.axes]
        known = math.prod(n for n in sizes if n is not None)
        missing = sizes.count(None)
        if missing > 1 or (missing and known and size % known):
            self.text.fail(dim, f"cannot size {dim.name} of a dim of {size}")
        if not missing and known != size:
            self.text.fail(dim, f"({dim.name}) is {known}, the dim is {size}")
        rest = size // known if known else 0
        each = zip(dim.axes, sizes, strict=True)
        return tuple(self.factor(axis, rest if n is None else n) for axis, n in each)

    def operand(self, operand: OperandExpression, shape: tuple[int, ...]) -> list[Factors]:
        aligned = self.aligned(operand, shape)
        return [self.broadcast(d, n) if isinstance(d, int) else self.dim(d, n) for d, n in aligned]

    def aligned(
        self, operand: OperandExpression, shape: tuple[int, ...]
    ) -> list[tuple[DimExpression | int, int]]:
        """Each dim and its size; those of an ellipsis are counted from its right."""
        dims, at = operand.dims, operand.ellipsis
        named = len(dims) - (at is not None)
        extra = len(shape) - named
        if extra < 0 or (extra and at is None):
            self.text.fail(operand, f"{named} dims for a tensor of rank {len(shape)}")
        if at is None:
            return list(zip(dims, shape, strict=True))
        spread: tuple[DimExpression | int, ...] = (*dims[:at], *reversed(range(extra)), *dims[at + 1 :])
        return list(zip(spread, shape, strict=True))

    def note(self, operand: OperandExpression, shape: tuple[int, ...]) -> None:
        """Note the sizes of dims that are one factor each."""
        for dim, size in self.aligned(operand, shape):
            if isinstance(dim, DimExpression) and len(dim.axes) == 1 and dim.axes[0].size is None:
                self.alone.setdefault(dim.name, size)

    def broadcast(self, position: int, size: int) -> Factors:
        if size == 1:
            return (-position - 1,)  # resolved in close(): the factor's size is not known yet
        name = f".{position}"
        known = self.number(name, size)
        if self.sizes[known] != size:
            raise RuleError(f"'...' is {self.sizes[known]} and {size} in dim {-position - 1} of it")
        return (known,)

    def close(self, operand: list[Factors]) -> tuple[Factors, ...]:
        return tuple(self._close(dim) for dim in operand)

    def _close(self, dim: Factors) -> Factors:
        if len(dim) == 1 and dim[0] < 0:
            name = f".{-dim[0] - 1}"
            return () if name in self.ids else (self.number(name + "'", 1),)
        return dim


@functools.lru_cache(maxsize=65536)
def instantiate(text: str, ins: OperandShapes, outs: OperandShapes) -> Rule:
    """The rule for these operand and result shapes. Raises RuleError where they do not fit."""
    try:
        return _instantiate(parse(text), ins, outs)
    except (AxisExpressionError, RuleError) as error:
        raise RuleError(f"factor rule {text!r} on {ins} -> {outs}: {error}") from None


def _instantiate(text: AxisExpression, ins: OperandShapes, outs: OperandShapes) -> Rule:
    if text.results is None:
        raise RuleError("needs exactly one '->'")
    for operand in text.arrays:
        if operand.dtype is not None:
            text.fail(operand.dtype, "a factor rule has no dtypes")
    # One operand without dims is spelled as nothing, just as none is.
    nothing = (OperandExpression((), None, 0),)
    left, right = text.operands or nothing * min(len(ins), 1), text.results or nothing * min(len(outs), 1)
    if len(left) != len(ins) or len(right) != len(outs):
        raise RuleError(
            f"is for {len(left)} operands and {len(right)} results, "
            f"got {len(ins)} and {len(outs)}"
        )
    build = _Builder(text)
    for operand, shape in zip((*left, *right), (*ins, *outs), strict=True):
        build.note(operand, shape)
    raw_outs = [build.operand(d, s) for d, s in zip(right, outs, strict=True)]
    raw_ins = [build.operand(d, s) for d, s in zip(left, ins, strict=True)]
    done_ins = tuple(build.close(o) for o in raw_ins)
    done_outs = tuple(build.close(o) for o in raw_outs)
    return _rule(build, _Said.by(build), done_ins, done_outs)


class _Words:
    """The words of one clause: factors, numbers, and a reduction."""

    def __init__(self, build: _Builder, clause: Clause) -> None:
        self.build, self.clause = build, clause

    def counted(self, least: int, most: int) -> tuple[Word, ...]:
        words = self.clause.words
        if not least <= len(words) <= most:
            form = _CLAUSES[self.clause.verb.text].form
            self.build.text.fail(self.clause.verb, f"the clause is {form!r}")
        return words

    def factor(self, word: Word) -> int:
        if word.text not in self.build.ids:
            self.build.text.fail(word, f"the rule has no factor {word.text!r}")
        return self.build.ids[word.text]

    def factors(self) -> set[int]:
        """Those named; of an ellipsis all, or those that it has in this call."""
        found: set[int] = set()
        for word in self.clause.words:
            if not word.text.startswith("."):
                found.add(self.factor(word))
            elif all(array.ellipsis is None for array in self.build.text.arrays):
                self.build.text.fail(word, "the rule has no '...'")
            else:
                of_all = word.text == "..."
                found |= {
                    f for n, f in self.build.ids.items() if n == word.text or (of_all and n[0] == ".")
                }
        return found

    def number(self, word: Word) -> int:
        if not word.is_number:
            self.build.text.fail(word, f"a number is expected here, not {word.text!r}")
        return int(word.text)

    def numbers(self) -> frozenset[int]:
        return frozenset(self.number(word) for word in self.clause.words)


@dataclass
class _Said:
    """What the clauses of a rule say, as far as they have been read."""

    whole: set[int] = field(default_factory=set)
    index: set[int] = field(default_factory=set)
    same: set[int] = field(default_factory=set)
    run: set[int] = field(default_factory=set)
    combine: dict[int, str] = field(default_factory=dict)
    ties: list[tuple[int, int]] = field(default_factory=list)
    halo: tuple[int, int, int] | None = None
    linear: list[frozenset[int]] = field(default_factory=list)

    @staticmethod
    def by(build: _Builder) -> _Said:
        said = _Said()
        for clause in build.text.clauses:
            verb = clause.verb
            if verb.text not in _CLAUSES:
                *most, last = _CLAUSES
                build.text.fail(
                    verb, f"unknown clause {verb.text!r}; there are {', '.join(most)} and {last}"
                )
            _CLAUSES[verb.text].read(said, _Words(build, clause))
        return said

    def reduced(self, words: _Words) -> None:
        factor, *op = words.counted(1, 2)
        if op and op[0].text not in REDUCTIONS:
            words.build.text.fail(op[0], f"the reductions are {', '.join(REDUCTIONS)}")
        self.combine[words.factor(factor)] = op[0].text if op else "sum"

    def tied(self, words: _Words) -> None:
        dim, blocks = words.counted(2, 2)
        self.ties.append((words.factor(dim), words.factor(blocks)))

    def haloed(self, words: _Words) -> None:
        blocks, each, moved = words.counted(3, 3)
        self.halo = words.factor(blocks), words.factor(each), words.number(moved)


class _Clause(NamedTuple):
    form: str
    read: Callable[[_Said, _Words], None]


_CLAUSES = {
    "whole": _Clause("whole FACTOR...", lambda said, words: said.whole.update(words.factors())),
    "index": _Clause("index FACTOR...", lambda said, words: said.index.update(words.factors())),
    "free": _Clause("free FACTOR...", lambda said, words: said.index.update(words.factors())),
    "same": _Clause("same FACTOR...", lambda said, words: said.same.update(words.factors())),
    "run": _Clause("run FACTOR...", lambda said, words: said.run.update(words.factors())),
    "reduce": _Clause("reduce FACTOR [sum|max|min]", _Said.reduced),
    "tie": _Clause("tie FACTOR FACTOR", _Said.tied),
    "halo": _Clause("halo FACTOR FACTOR NUMBER", _Said.haloed),
    "linear": _Clause("linear OPERAND...", lambda said, words: said.linear.append(words.numbers())),
}


def _rule(
    build: _Builder,
    said: _Said,
    ins: tuple[tuple[Factors, ...], ...],
    outs: tuple[tuple[Factors, ...], ...],
) -> Rule:
    """The rule, with what follows where no clause says otherwise."""
    on_result = {f for out in outs for dim in out for f in dim}
    on_operand = {f for i in ins for dim in i for f in dim}
    tied = {f for pair in said.ties for f in pair}
    made_of_nothing = on_result - on_operand - said.index - tied
    whole = said.whole | made_of_nothing  # which could not be split
    on_each = [{f for dim in out for f in dim} for out in outs]
    on_all = set[int]().union(*on_each).intersection(*on_each)
    summed = on_operand - whole - on_all - tied - said.same
    combine = dict.fromkeys(summed, "sum") | said.combine
    return Rule(
        sizes=tuple(0 if s is None else s for s in build.sizes),
        ins=ins,
        outs=outs,
        whole=frozenset(whole),
        combine=tuple(sorted((f, op) for f, op in combine.items() if f not in whole)),
        linear=tuple(said.linear),
        index=frozenset(said.index),
        run=frozenset(said.run | tied | set(said.halo[:1] if said.halo else ())),
        names=tuple(build.ids),
        ties=tuple(said.ties),
        halo=said.halo,
    )


@functools.lru_cache(maxsize=4096)
def gathering_rule(ins: OperandShapes, outs: OperandShapes) -> Rule:
    """The rule of last resort: nothing may be split."""
    sizes: list[int] = []

    def number(shape: tuple[int, ...]) -> tuple[Factors, ...]:
        first = len(sizes)
        sizes.extend(shape)
        return tuple((first + i,) for i in range(len(shape)))

    numbered_ins = tuple(number(s) for s in ins)
    numbered_outs = tuple(number(s) for s in outs)
    return Rule(
        sizes=tuple(sizes),
        ins=numbered_ins,
        outs=numbered_outs,
        whole=frozenset(range(len(sizes))),
        gathered=True,
        names=tuple(f"d{i}" for i in range(len(sizes))),
    )
