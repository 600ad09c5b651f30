"""Factor rules: one line that states how an operation can be split.

Factor rules follow Shardy's sharding rules (https://openxla.org/shardy), in the notation of einops. A
rule is an axis expression (``axis_expressions.py``) whose axes are the factors of an operation's dims.
The docstring of `torchard.register_rule` describes the parts of a rule, with an example of each.

Parsed rules are cached by their text, instantiated ones by the shapes as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
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
from torchard.sharding.layouts.interned import Interned

__all__ = ["Rule", "RuleError", "gathering_rule", "instantiate"]

OperandShapes = tuple[tuple[int, ...], ...]
REDUCTIONS = ("sum", "max", "min")
Factors = tuple[int, ...]  # the factors of one dim, outermost first


class RuleError(ValueError):
    """A factor rule cannot be parsed, or does not fit the shapes."""


@dataclass(frozen=True, eq=False)
class Rule(metaclass=Interned):
    """A factor rule for given shapes; equal ones are one object.

    Attributes:
        sizes: the size of each factor.
        ins, outs: for every operand and result, the factors of each dim.
        whole: factors that may not be split.
        combine: factors that some result lacks, each with the reduction of the partial results.
        linear: sets of operands in which the operation is jointly linear.
        index: factors on no operand, of which each coordinate can compute its own part.
        run: factors that are split as a single dim or not at all.
        gathered: whether this is the fallback rule, by which all operands are gathered.
        names: the name of each factor.
        ties: pairs of a dim's factor and that of its blocks: they are split together, one block per rank.
        halo: set where the operation itself moves data between blocks: the factor of the blocks, that of
            a block's elements, and how many of these the busiest rank sends or receives.
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
    def combiner(self) -> dict[int, str]:
        return dict(self.combine)

    @functools.cached_property
    def on_result(self) -> frozenset[int]:
        return frozenset(f for out in self.outs for dim in out for f in dim)


class _Builder:
    """Numbers the factors of a rule, and finds their sizes in the shapes.

    Attributes:
        ids: the number of each factor, by name.
        sizes: the size of each factor, by number; None if it is not known yet.
        alone: the sizes of factors that are a whole dim somewhere, known before any product is sized.
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
        """The factors of a dim."""
        if dim.name == "1":
            if size != 1:
                self.text.fail(dim, f"the dim is {size}, not 1")
            return ()
        if _is_one_factor(dim):
            return (self.factor(dim.axes[0], size),)
        sizes = self._sizes_in_product(dim, size)
        return tuple(self.factor(axis, n) for axis, n in zip(dim.axes, sizes, strict=True))

    def _sizes_in_product(self, dim: DimExpression, size: int) -> list[int]:
        """The size of each factor of a dim; at most one is not known, and follows from the dim's size."""
        sizes = [self.alone.get(a.name) if a.size is None else a.size for a in dim.axes]
        known = math.prod(n for n in sizes if n is not None)
        missing = sizes.count(None)
        if missing > 1 or (missing and known and size % known):
            self.text.fail(dim, f"cannot infer the sizes of ({dim.name}) from a dim of {size}")
        if not missing and known != size:
            self.text.fail(dim, f"({dim.name}) is {known}, the dim is {size}")
        inferred = size // known if known else 0
        return [inferred if n is None else n for n in sizes]

    def operand(self, operand: OperandExpression, shape: tuple[int, ...]) -> list[Factors]:
        """The factors of each dim; a broadcast dim of size one gets a placeholder (see ``close``)."""
        aligned = self.aligned(operand, shape)
        return [self.broadcast(d, n) if isinstance(d, int) else self.dim(d, n) for d, n in aligned]

    def aligned(
        self, operand: OperandExpression, shape: tuple[int, ...]
    ) -> list[tuple[DimExpression | int, int]]:
        """Each dim with its size; a dim of the ellipsis is its position, counted from the right."""
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
        """Note the sizes of factors that are a dim each."""
        for dim, size in self.aligned(operand, shape):
            if isinstance(dim, DimExpression) and _is_one_factor(dim):
                self.alone.setdefault(dim.name, size)

    def broadcast(self, position: int, size: int) -> Factors:
        """The factor of a dim of the ellipsis."""
        if size == 1:
            return (-position - 1,)  # a placeholder: the factor's size is not known yet
        name = f".{position}"
        known = self.number(name, size)
        if self.sizes[known] != size:
            raise RuleError(f"dim {-position - 1} of '...' is {self.sizes[known]} and {size}")
        return (known,)

    def close(self, operand: list[Factors]) -> tuple[Factors, ...]:
        """The factors of each dim, with placeholders of broadcast dims resolved."""
        return tuple(self._close(dim) for dim in operand)

    def _close(self, dim: Factors) -> Factors:
        if len(dim) == 1 and dim[0] < 0:
            name = f".{-dim[0] - 1}"
            return () if name in self.ids else (self.number(name + "'", 1),)
        return dim


def _is_one_factor(dim: DimExpression) -> bool:
    """Whether a dim is a single factor, whose size is the dim's."""
    return len(dim.axes) == 1 and dim.axes[0].size is None


@functools.lru_cache(maxsize=16384)
def instantiate(text: str, ins: OperandShapes, outs: OperandShapes) -> Rule:
    """The rule for these shapes of operands and results.

    Raises:
        RuleError: the text is no rule, or does not fit the shapes.
    """
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
    # An empty side of the arrow means no operand, or one without dims.
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
    closed_ins = tuple(build.close(o) for o in raw_ins)
    closed_outs = tuple(build.close(o) for o in raw_outs)
    return _rule(build, _Clauses.of(build), closed_ins, closed_outs)


class _Words:
    """The words of one clause, read as factors, numbers or a reduction."""

    def __init__(self, build: _Builder, clause: Clause) -> None:
        self.build, self.clause = build, clause

    def counted(self, least: int, most: int) -> tuple[Word, ...]:
        """The words, whose number must be between ``least`` and ``most``."""
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
        """The factors that the clause names; ``...`` is every dim of the ellipsis, ``.0`` its last."""
        named: set[int] = set()
        for word in self.clause.words:
            if not word.text.startswith("."):
                named.add(self.factor(word))
            elif all(array.ellipsis is None for array in self.build.text.arrays):
                self.build.text.fail(word, "the rule has no '...'")
            else:
                of_all = word.text == "..."
                named |= {
                    f for n, f in self.build.ids.items() if n == word.text or (of_all and n[0] == ".")
                }
        return named

    def number(self, word: Word) -> int:
        if not word.is_number:
            self.build.text.fail(word, f"a number is expected here, not {word.text!r}")
        return int(word.text)

    def numbers(self) -> frozenset[int]:
        return frozenset(self.number(word) for word in self.clause.words)


@dataclass
class _Clauses:
    """The contents of a rule's clauses, as far as they have been read."""

    whole: set[int] = field(default_factory=set)
    index: set[int] = field(default_factory=set)
    same: set[int] = field(default_factory=set)
    run: set[int] = field(default_factory=set)
    combine: dict[int, str] = field(default_factory=dict)
    ties: list[tuple[int, int]] = field(default_factory=list)
    halo: tuple[int, int, int] | None = None
    linear: list[frozenset[int]] = field(default_factory=list)

    @staticmethod
    def of(build: _Builder) -> _Clauses:
        """The contents of all clauses."""
        clauses = _Clauses()
        for clause in build.text.clauses:
            verb = clause.verb
            if verb.text not in _CLAUSES:
                *most, last = _CLAUSES
                build.text.fail(
                    verb, f"unknown clause {verb.text!r}; the clauses are {', '.join(most)} and {last}"
                )
            _CLAUSES[verb.text].read(clauses, _Words(build, clause))
        return clauses

    def read_reduce(self, words: _Words) -> None:
        factor, *op = words.counted(1, 2)
        if op and op[0].text not in REDUCTIONS:
            words.build.text.fail(op[0], f"the reductions are {', '.join(REDUCTIONS)}")
        self.combine[words.factor(factor)] = op[0].text if op else "sum"

    def read_tie(self, words: _Words) -> None:
        dim, blocks = words.counted(2, 2)
        self.ties.append((words.factor(dim), words.factor(blocks)))

    def read_halo(self, words: _Words) -> None:
        blocks, elements, moved = words.counted(3, 3)
        self.halo = words.factor(blocks), words.factor(elements), words.number(moved)

    @property
    def tied(self) -> set[int]:
        """The factors of dims that are split with their blocks, and of the blocks."""
        return {f for pair in self.ties for f in pair}


class _Clause(NamedTuple):
    form: str
    read: Callable[[_Clauses, _Words], None]


_CLAUSES = {
    "whole": _Clause("whole FACTOR...", lambda clauses, words: clauses.whole.update(words.factors())),
    "index": _Clause("index FACTOR...", lambda clauses, words: clauses.index.update(words.factors())),
    "free": _Clause("free FACTOR...", lambda clauses, words: clauses.index.update(words.factors())),
    "same": _Clause("same FACTOR...", lambda clauses, words: clauses.same.update(words.factors())),
    "run": _Clause("run FACTOR...", lambda clauses, words: clauses.run.update(words.factors())),
    "reduce": _Clause("reduce FACTOR [sum|max|min]", _Clauses.read_reduce),
    "tie": _Clause("tie FACTOR FACTOR", _Clauses.read_tie),
    "halo": _Clause("halo FACTOR FACTOR NUMBER", _Clauses.read_halo),
    "linear": _Clause("linear OPERAND...", lambda clauses, words: clauses.linear.append(words.numbers())),
}


def _rule(
    build: _Builder,
    clauses: _Clauses,
    ins: tuple[tuple[Factors, ...], ...],
    outs: tuple[tuple[Factors, ...], ...],
) -> Rule:
    """The rule, with defaults where its clauses state nothing."""
    on_operand, on_each_result = _factors_of(ins), [_factors_of([out]) for out in outs]
    on_result = set[int]().union(*on_each_result)
    # A factor that no operand has cannot be split, unless a clause says how it is computed.
    whole = clauses.whole | (on_result - on_operand - clauses.index - clauses.tied)
    # A factor that some result lacks is summed over there.
    on_all_results = on_result.intersection(*on_each_result)
    summed = on_operand - whole - on_all_results - clauses.tied - clauses.same
    combine = dict.fromkeys(summed, "sum") | clauses.combine
    halo_blocks = set(clauses.halo[:1] if clauses.halo else ())
    return Rule(
        sizes=tuple(size or 0 for size in build.sizes),
        ins=ins,
        outs=outs,
        whole=frozenset(whole),
        combine=tuple(sorted((f, op) for f, op in combine.items() if f not in whole)),
        linear=tuple(clauses.linear),
        index=frozenset(clauses.index),
        run=frozenset(clauses.run | clauses.tied | halo_blocks),
        names=tuple(build.ids),
        ties=tuple(clauses.ties),
        halo=clauses.halo,
    )


def _factors_of(tensors: Iterable[tuple[Factors, ...]]) -> set[int]:
    """The factors of all dims of these tensors."""
    return {f for dims in tensors for dim in dims for f in dim}


@functools.lru_cache(maxsize=4096)
def gathering_rule(ins: OperandShapes, outs: OperandShapes) -> Rule:
    """The fallback rule, by which nothing may be split."""
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
