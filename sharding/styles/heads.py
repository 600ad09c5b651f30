"""Heads: which features of a projection stay together, read off a trace.

A projection may be split between its heads but not inside them, and the views that follow it show where
they are. So each dim of each weight is followed through the program by the factor rules. Where a view
factors it, the outermost factor may be split (``features -> (heads d)``); where slices are taken of it,
what is inside each slice may be split (``(three features)``). Where two dims meet on one factor, as those
of queries and keys do, both are split alike: in grouped-query attention q and the output projection are
split by the groups of k and v.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from torchard.functional.loops.rolled import rolled
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.compute.attention_on_cuda import KERNELS
from torchard.sharding.rules.registry import result_index

__all__ = ["Units", "units_of"]

Units = tuple[int, int]  # the number of consecutive parts of a dim, and of units in each part
Source = tuple[str, int]  # a parameter and its dim

_TAKES = {aten.select.int, aten.unbind.int}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default, *KERNELS}  # that have a rule


@dataclass(frozen=True)
class _Mark:
    """Where the units of a source are in a value.

    Attributes:
        dim: the dim that holds them.
        before: the product of the factors of that dim that are outside of the units.
        source: the dim of a parameter that they come from.
    """

    dim: int
    before: int
    source: Source


def units_of(program: Program) -> dict[str, tuple[Units, ...]]:
    """The units of each dim of each parameter, by the parameter's dotted name.

    Args:
        program: a trace of the model whose first argument is the parameters.
    """
    program = rolled(program)
    weights = {
        name: node
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        if (name := _dotted(leaf.path)) is not None
    }
    walk = _Walk(program.graph, weights)
    while walk.refine():
        pass
    return {
        name: tuple(walk.units((name, dim)) for dim in range(VAL.of(node).ndim))
        for name, node in weights.items()
    }


def _dotted(path: str) -> str | None:
    first, rest = path[: len("args[0]")], path[len("args[0]") :]
    if first != "args[0]":
        return None
    steps = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)", rest)
    return ".".join("".join(step) for step in steps)


class _Walk:
    """Walks through a program that determine the units of its weights' dims (the sources).

    Attributes:
        parts: the number of parts of each source, as known before a walk.
        parts_seen: the number of parts of each source, including slices found during the walk.
        counts: the number of units in each part of a source; sources split alike have the root's number.
        alike: source -> another source that is split like it (a union-find).
    """

    def __init__(self, graph: fx.Graph, weights: dict[str, fx.Node]) -> None:
        self.graph, self.weights = graph, weights
        self.parts: dict[Source, int] = {}
        self.parts_seen: dict[Source, int] = {}
        self.counts: dict[Source, int] = {}
        self.alike: dict[Source, Source] = {}

    def units(self, source: Source) -> Units:
        return self.parts[source], self.counts[self._root(source)]

    def refine(self) -> bool:
        """Follow all sources through the program; True if new parts were seen, so another walk is due."""
        self.counts, self.alike = {}, {}
        marks: dict[fx.Node, list[list[_Mark]]] = {}
        for name, node in self.weights.items():
            sources = [(name, dim) for dim in range(VAL.of(node).ndim)]
            for source in sources:
                self.counts[source] = self._size(source) // self.parts.setdefault(source, 1)
            marks[node] = [[_Mark(s[1], self.parts[s], s) for s in sources]]
        self.parts_seen = dict(self.parts)
        for node in self.graph.nodes:
            if node.op == "call_function" and any(marks.get(n) for n in node.all_input_nodes):
                marks[node] = self._through(node, marks)
        before, self.parts = self.parts, self.parts_seen
        return self.parts != before

    def _through(self, node: fx.Node, marks: dict[fx.Node, list[list[_Mark]]]) -> list[list[_Mark]]:
        """The marks of each result of an operation."""
        if node.target is operator.getitem:
            of_results = marks[node.all_input_nodes[0]]
            return [of_results[result_index(node)]] if hasattr(VAL.of(node), "shape") else []
        call = Call.of(node)
        rule = rule_of(call)
        sources: dict[tuple[int, int], Source] = {}
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            for mark in next(iter(marks.get(operand, ())), ()):
                at = _located(rule, dims[mark.dim], mark.before)
                if at is None:
                    continue
                factor, inside = at
                room = rule.sizes[factor] // inside
                sliced = rule.whole | rule.run if call.target in _TAKES else rule.whole
                if factor in sliced and self._makes_parts(call, mark, rule, dims[mark.dim], factor):
                    self._see_parts(mark.source, room)
                    continue
                if factor in rule.whole and call.target in _ATTENTION:
                    room = 1  # a single head, which cannot be split
                self._join(sources.setdefault(at, mark.source), mark.source, room)
        kept = {at: source for at, source in sources.items() if at[0] not in rule.whole}
        return [list(_marks_on(rule, dims, kept)) for dims in rule.outs]

    def _see_parts(self, source: Source, slices: int) -> None:
        """Divide each part into n slices; if their sizes differ, into a common multiple."""
        parts = math.lcm(self.parts_seen[source], self.parts[source] * slices)
        if self._size(source) % parts == 0:
            self.parts_seen[source] = parts

    def _size(self, source: Source) -> int:
        return int(VAL.of(self.weights[source[0]]).shape[source[1]])

    def _makes_parts(
        self, call: Call, mark: _Mark, rule: Rule, factors: tuple[int, ...], factor: int
    ) -> bool:
        """Whether an operation slices a source into parts with separate units."""
        parts, count = self.units(mark.source)
        if call.target in _TAKES:
            return self._size(mark.source) > parts * count
        return any(rule.sizes[f] > 1 for f in factors[factors.index(factor) + 1 :])

    def _root(self, source: Source) -> Source:
        while source in self.alike:
            source = self.alike[source]
        return source

    def _join(self, a: Source, b: Source, room: int) -> None:
        """Split two sources in the same way, into a number of units that divides both of theirs and
        ``room``."""
        a, b = self._root(a), self._root(b)
        self.counts[a] = self.counts[b] = math.gcd(self.counts[a], self.counts[b], room)
        if a != b:
            self.alike[b] = a


def _located(rule: Rule, factors: tuple[int, ...], before: int) -> tuple[int, int] | None:
    """The factor of a dim that has the units after ``before``, and what of ``before`` is inside it."""
    for factor in factors:
        size = rule.sizes[factor]
        if size and before % size == 0 and before >= size:
            before //= size
        else:
            return (factor, before) if size and size % before == 0 else None
    return None


def _marks_on(
    rule: Rule, dims: tuple[tuple[int, ...], ...], sources: dict[tuple[int, int], Source]
) -> Iterator[_Mark]:
    """The marks of a result, from the sources that were located on factors."""
    for dim, factors in enumerate(dims):
        before = 1
        for factor in factors:
            for (marked, inside), source in sources.items():
                if marked == factor:
                    yield _Mark(dim, before * inside, source)
            before *= rule.sizes[factor]
