"""Heads: which features of a projection stay together, read off a trace.

A projection may be split between its heads, not inside them; where they are shows in the views that
follow it. So every dim of every weight is followed through the program, by the factor rules: a view that
takes it apart leaves its outermost factor to be split (``features -> (heads d)``), a cut leaves what is
inside its pieces (``(three features)``), and where two of them meet on one factor, as queries and keys
do, both are split alike: q by the groups of k and v in grouped attention, and the output projection too.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["Units", "units_of"]

Units = tuple[int, int]  # parts, one after the other, and the units that each of them is split into
Source = tuple[str, int]  # a parameter and its dim

_TAKES = {aten.select.int, aten.unbind.int}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default}  # of those with a rule


@dataclass(frozen=True)
class _Mark:
    """A dim of a value is ``before`` times the units of a source times what is inside a unit."""

    dim: int
    before: int
    source: Source


def units_of(program: Program) -> dict[str, tuple[Units, ...]]:
    """The units of each dim of each parameter: of the leaves of the first argument, by dotted name.

    Args:
        program: a trace of the model, its parameters the first argument.
    """
    weights = {
        name: node
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        if (name := _dotted(leaf.path)) is not None
    }
    walk = _Walk(program.graph, weights)
    while walk.recut():
        pass
    return {
        name: tuple(walk.units((name, dim)) for dim in range(VAL.of(node).ndim))
        for name, node in weights.items()
    }


def _dotted(path: str) -> str | None:
    first, rest = path[: len("args[0]")], path[len("args[0]") :]
    if first != "args[0]":
        return None
    return ".".join("".join(found) for found in re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", rest))


class _Walk:
    def __init__(self, graph: fx.Graph, weights: dict[str, fx.Node]) -> None:
        self.graph, self.weights = graph, weights
        self.parts: dict[Source, int] = {}
        self.cut: dict[Source, int] = {}
        self.counts: dict[Source, int] = {}
        self.alike: dict[Source, Source] = {}

    def units(self, source: Source) -> Units:
        return self.parts[source], self.counts[self._first(source)]

    def recut(self) -> bool:
        """Follow all sources through the program; True if a cut was met, and another round is due."""
        self.counts, self.alike = {}, {}
        marks: dict[fx.Node, list[list[_Mark]]] = {}
        for name, node in self.weights.items():
            sources = [(name, dim) for dim in range(VAL.of(node).ndim)]
            for source in sources:
                self.counts[source] = self._size(source) // self.parts.setdefault(source, 1)
            marks[node] = [[_Mark(s[1], self.parts[s], s) for s in sources]]
        self.cut = dict(self.parts)
        for node in self.graph.nodes:
            if node.op == "call_function" and any(marks.get(n) for n in node.all_input_nodes):
                marks[node] = self._through(node, marks)
        known, self.parts = self.parts, self.cut
        return self.parts != known

    def _through(self, node: fx.Node, marks: dict[fx.Node, list[list[_Mark]]]) -> list[list[_Mark]]:
        """The marks of each result of an operation."""
        if node.target is operator.getitem:
            own = marks[node.all_input_nodes[0]]
            return [own[result_index(node)]] if hasattr(VAL.of(node), "shape") else []
        call = Call.of(node)
        rule = rule_of(call)
        met: dict[tuple[int, int], Source] = {}
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            for mark in next(iter(marks.get(operand, ())), ()):
                at = _located(rule, dims[mark.dim], mark.before)
                if at is None:
                    continue
                factor, inside = at
                room = rule.sizes[factor] // inside
                taken = rule.whole | rule.run if call.target in _TAKES else rule.whole
                if factor in taken and self._cuts(call, mark, rule, dims[mark.dim], factor):
                    self._cut(mark.source, room)
                    continue
                if factor in rule.whole and call.target in _ATTENTION:
                    room = 1  # a lone head: what is inside it cannot be split
                self._join(met.setdefault(at, mark.source), mark.source, room)
        kept = {at: source for at, source in met.items() if at[0] not in rule.whole}
        return [list(_marks_on(rule, dims, kept)) for dims in rule.outs]

    def _cut(self, source: Source, pieces: int) -> None:
        """There are so many pieces in each part; pieces of several sizes have a common measure."""
        parts = math.lcm(self.cut[source], self.parts[source] * pieces)
        if self._size(source) % parts == 0:
            self.cut[source] = parts

    def _size(self, source: Source) -> int:
        return int(VAL.of(self.weights[source[0]]).shape[source[1]])

    def _cuts(
        self, call: Call, mark: _Mark, rule: Rule, factors: tuple[int, ...], factor: int
    ) -> bool:
        """Whether pieces of a dim are taken, and units are to be found in each of them."""
        parts, count = self.units(mark.source)
        if call.target in _TAKES:
            return self._size(mark.source) > parts * count
        return any(rule.sizes[f] > 1 for f in factors[factors.index(factor) + 1 :])

    def _first(self, source: Source) -> Source:
        while source in self.alike:
            source = self.alike[source]
        return source

    def _join(self, one: Source, other: Source, room: int) -> None:
        """Two sources are split alike, into what divides both and the room there is."""
        one, other = self._first(one), self._first(other)
        count = math.gcd(self.counts[one], self.counts[other], room)
        self.counts[one] = self.counts[other] = count
        if one != other:
            self.alike[other] = one


def _located(rule: Rule, factors: tuple[int, ...], before: int) -> tuple[int, int] | None:
    """The factor of a dim in which what comes after ``before`` begins, and how far inside it."""
    for factor in factors:
        size = rule.sizes[factor]
        if size and before % size == 0 and before >= size:
            before //= size
        else:
            return (factor, before) if size and size % before == 0 else None
    return None


def _marks_on(
    rule: Rule, dims: tuple[tuple[int, ...], ...], met: dict[tuple[int, int], Source]
) -> Iterator[_Mark]:
    for dim, factors in enumerate(dims):
        before = 1
        for factor in factors:
            for (found, inside), source in met.items():
                if found == factor:
                    yield _Mark(dim, before * inside, source)
            before *= rule.sizes[factor]
