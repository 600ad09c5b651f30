"""Plans of replacements: operands of a kernel and nodes that become dead, or why it is not inserted.

On a pure graph a replacement is sound if it creates no cycle. It is worthwhile if it moves fewer bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchard.functional.programs.tags import LOOP, SEGMENTS, VAL
from torchard.functional.programs.views import depending_on, is_view
from torchard.functional.torch_internals.operators import aten
from torchard.kernels.patterns.match import Occurrence, Root
from torchard.kernels.rewriting.memory_traffic import moved, moves_nothing, size_of
from torchard.kernels.terms.reading import Reading
from torchard.kernels.terms.terms import Term, TermValue, through

__all__ = ["REPLACED", "Part", "Planner", "Replacement", "Rest"]

REPLACED = "it has already been replaced"

# The other operands of a sum that a kernel's result is part of: nodes, how they are read, and factors.
Rest = list[tuple[fx.Node, TermValue, float]]


@dataclass
class Part:
    """One occurrence within a replacement.

    Attributes:
        sources: for each input, the node it is viewed from; None if a product must be inserted for it.
        roots: for each root, the nodes whose users are redirected to the kernel.
        rests: for each root, the other operands of the sum that it is part of.
        gone: the nodes that become dead because of this occurrence.
        before, after: the bytes moved by the dead nodes, and by the kernel.
    """

    occurrence: Occurrence
    sources: list[fx.Node | None]
    roots: list[list[fx.Node]]
    rests: list[Rest]
    gone: set[fx.Node] = field(default_factory=set)
    before: int = 0
    after: int = 0

    @property
    def firsts(self) -> list[fx.Node]:
        """The first node of each root."""
        return [nodes[0] for nodes in self.roots]

    @property
    def makers(self) -> list[fx.Node]:
        """All nodes that compute roots."""
        return [node for nodes in self.roots for node in nodes]

    @property
    def operations(self) -> int:
        """The number of dead nodes that compute something."""
        return sum(not moves_nothing(node) for node in self.gone)


@dataclass
class Replacement:
    """A plan to replace occurrences at once: a kernel's own, and its gradient's.

    Attributes:
        gone: all nodes that become dead.
        before, after: the bytes moved.
        refused: the reason why it must not be done; empty if it may.
    """

    parts: list[Part]
    gone: set[fx.Node] = field(default_factory=set)
    before: int = 0
    after: int = 0
    refused: str = ""

    @property
    def operations(self) -> int:
        """The number of dead nodes that compute something."""
        return sum(part.operations for part in self.parts)

    @property
    def results(self) -> list[fx.Node]:
        """The nodes whose values are read from the kernels afterwards."""
        return [node for part in self.parts for node in part.makers]


@dataclass(frozen=True)
class Refusal:
    """The reason why an occurrence is not replaced."""

    why: str


class Planner:
    """Plans replacements in a program; changes nothing.

    Args:
        wanted: whether a label requires that a node's value stays in the program.

    Attributes:
        erased: the nodes that have been erased since the program was read.
    """

    def __init__(
        self, reading: Reading, wanted: Callable[[fx.Node], bool] = lambda _: False
    ) -> None:
        self.reading = reading
        self.graph = reading.program.graph
        self.wanted = wanted
        self.erased: set[fx.Node] = set()

    def plan(self, occurrences: Sequence[Occurrence]) -> Replacement:
        """The replacement of some occurrences."""
        plan = Replacement([])
        for occurrence in occurrences:
            part = self._part(occurrence)
            if isinstance(part, Refusal):
                plan.refused = part.why
                return plan
            plan.parts.append(part)
        roots = plan.results
        # An input that another kernel returns is read from that kernel.
        pinned = {n for part in plan.parts for n in part.sources if n is not None} - set(roots)
        pinned.update(n for part in plan.parts for rest in part.rests for n, *_ in rest)
        left = plan.gone = self._gone(roots, pinned)
        # Nodes that die because of several parts count for the first; a gradient's are its own only.
        for part in plan.parts[:0:-1]:
            part.gone = self._gone(part.makers, pinned) & left
            left = left - part.gone
        plan.parts[0].gone = left
        self._weigh(plan)
        plan.refused = self._refusal(plan, set(roots))
        return plan

    def _part(self, occurrence: Occurrence) -> Part | Refusal:
        """The replacement of an occurrence, or why it must not be replaced."""
        read = {value.term for value in occurrence.inputs}
        computed = [(root, self._makers(root.term, root.term in read)) for root in occurrence.roots]
        # A result that equals an input (a bias's gradient) may have no operation of its own.
        kept = [(root, nodes) for root, nodes in computed if nodes or root.term not in read]
        makers = [nodes for _, nodes in kept]
        if not makers or not all(makers):
            return Refusal(REPLACED)
        makers = self._in_first_loop(makers)
        if not all(makers):
            return Refusal("its results are computed in different loops")
        after = depending_on(node for nodes in makers for node in nodes)
        after |= self._after_loops({LOOP.of(n) for nodes in makers for n in nodes if LOOP.on(n)})
        sources = [self._source(value, after) for value in occurrence.inputs]
        if not all(map(self._is_available, sources, occurrence.inputs, itertools.repeat(after))):
            return Refusal("one of its inputs is not a value of the program, or depends on its result")
        roots = tuple(root for root, _ in kept)
        rests = self._rests(roots, after)
        if rests is None:
            return Refusal("the rest of a sum that it is part of is not a value of the program")
        return Part(replace(occurrence, roots=roots), sources, makers, rests)

    def _in_first_loop(self, makers: list[list[fx.Node]]) -> list[list[fx.Node]]:
        """The nodes that are in the loop of the first node, where the kernel would be."""
        if not any(LOOP.on(node) for nodes in makers for node in nodes):
            return makers
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        loop = LOOP.get(min((n for nodes in makers for n in nodes), key=order.__getitem__))
        return [[node for node in nodes if LOOP.get(node) is loop] for nodes in makers]

    def _after_loops(self, loops: Collection[Any]) -> set[fx.Node]:
        """The nodes outside of these loops that depend on them; loops depend as a whole."""
        known, after = set(loops), set[fx.Node]()
        while known:
            after = depending_on(node for node in self.graph.nodes if LOOP.get(node) in known)
            found = {LOOP.of(node) for node in after if LOOP.on(node)}
            if found <= known:
                break
            known |= found
        return {node for node in after if LOOP.get(node) not in loops}

    def _rests(self, roots: Iterable[Root], after: set[fx.Node]) -> list[Rest] | None:
        """The rest of the sum that each root is part of; None if one is not a value of the program."""
        rests = [self._rest(root, after) for root in roots]
        known = [rest for rest in rests if rest is not None]
        return known if len(known) == len(rests) else None

    def _is_available(self, source: fx.Node | None, value: TermValue, after: set[fx.Node]) -> bool:
        """Whether a node has an input's value, or a product with a bias from which it can be taken."""
        if source is not None:
            return True
        node = self.reading.products.get(value.term)
        return node is not None and after.isdisjoint(node.all_input_nodes[-2:])

    def _refusal(self, plan: Replacement, roots: set[fx.Node]) -> str:
        """The reason why a plan must not be carried out; empty if it may."""
        if any(self.wanted(node) for node in plan.gone - roots):
            return "a value inside it is requested by its label"
        for part in plan.parts:
            marks = {SEGMENTS.get(n, ()) for n in part.gone if not moves_nothing(n)}
            if len(marks) > 1:
                return "it crosses the boundary of a checkpointed segment"
            if any(map(LOOP.on, part.makers)) and not all(map(LOOP.on, filter(_computes, part.gone))):
                return "it would compute in each iteration of a loop a value that none changes"
        return ""

    def _makers(self, term: Term, given: bool = False) -> list[fx.Node]:
        """The nodes that compute a term rather than view it; if it is given, those that recompute it."""
        alive = [n for n in self.reading.nodes[term] if n not in self.erased][given:]
        computed = [n for n in alive if n.op == "call_function" and not is_view(n)]
        return [n for n in computed if not self._lays_out(n, term)] or computed

    def _lays_out(self, node: fx.Node, term: Term) -> bool:
        """Whether a node is a copy in the layout that its users view, which must be kept."""
        copied = [n for n in node.all_input_nodes[:1] if node.target is aten.clone.default]
        return any(
            self.reading.value(n).term is term
            and VAL.of(n).stride() != VAL.of(node).stride()
            for n in copied
        )

    def inside(self, part: Part) -> set[fx.Node]:
        """The nodes between the inputs and the results of an occurrence, both exclusive."""
        ends = {node for node in part.sources if node is not None}
        for value in part.occurrence.inputs:
            product = self.reading.products.get(value.term)
            ends.update(() if product is None else product.all_input_nodes)
        inside: set[fx.Node] = set()
        todo = part.makers
        while todo:
            operands = {n for n in todo.pop().all_input_nodes if n.op == "call_function"}
            fresh = operands - inside - ends
            inside |= fresh
            todo += fresh
        return inside

    def _source(self, value: TermValue, after: set[fx.Node]) -> fx.Node | None:
        """The node from which a value is best read; None if there is none."""
        nodes = [
            n
            for n in self.reading.nodes.get(value.term, ())
            if n not in self.erased and n not in after
        ]
        if not nodes:
            return None
        as_is = [n for n in nodes if self.reading.value(n) == value]
        shaped = [n for n in nodes if value.is_reshape_of(self.reading.value(n))]
        # From any other the value is read by strides, which are those of the whole buffer.
        elements = math.prod(value.term.sizes)
        whole = [n for n in nodes if self.reading.value(n).access.distinct == elements]
        return next(iter(as_is or shaped or whole), None)

    def _rest(self, root: Root, after: set[fx.Node]) -> Rest | None:
        """The rest of the sum that a root is part of; None if it is not a value of the program."""
        if not root.rest:
            return []
        total = self.reading.first[root.term]
        rest: Rest = []
        for k in root.rest:
            value = through(total, k)
            factor = float(root.term.numbers[k])
            if value is None:
                return None
            scaled = self.reading.store.scale(value, factor)
            node = self._source(scaled, after)
            if node is not None:
                rest.append((node, scaled, 1.0))
                continue
            node = self._source(value, after)
            if node is None:
                return None
            rest.append((node, value, factor))
        return rest

    def _gone(self, roots: Sequence[fx.Node], pinned: Collection[Any]) -> set[fx.Node]:
        """The nodes that become dead once the users of some nodes are redirected."""
        gone: set[fx.Node] = set()
        todo = list(roots)
        outputs = {self.graph.output_node()}
        redirected = set(roots)
        while todo:
            node = todo.pop()
            if node in gone or node in pinned or node.op != "call_function":
                continue
            if node not in redirected and any(u not in gone or u in outputs for u in node.users):
                continue
            gone.add(node)
            todo += node.all_input_nodes
        return gone

    def _weigh(self, plan: Replacement) -> None:
        """Count the bytes that are moved before and after."""
        inserted: set[Term] = set()
        for part in plan.parts:
            inputs, roots = part.occurrence.inputs, part.occurrence.roots
            part.before = sum(map(moved, part.gone))
            part.after = sum(map(_bytes, inputs)) + sum(_bytes(root.value) for root in roots)
            for node, value in zip(part.sources, inputs, strict=True):
                if node is None and value.term not in inserted:
                    biased = self.reading.products[value.term]
                    part.after += _bytes(value) + sum(map(size_of, biased.all_input_nodes[-2:]))
                    inserted.add(value.term)
            for root, rest in zip(roots, part.rests, strict=True):
                part.after += sum(_bytes(value) + 2 * _bytes(root.value) for _, value, _ in rest)
        plan.before = sum(part.before for part in plan.parts)
        plan.after = sum(part.after for part in plan.parts)


def _computes(node: fx.Node) -> bool:
    return not moves_nothing(node)


def _bytes(value: TermValue) -> int:
    return value.access.distinct * value.dtype.itemsize
