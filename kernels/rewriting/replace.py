"""Replacement: users of an occurrence's results read a kernel's results instead; dead nodes are erased.

On a pure graph this is sound if it creates no cycle. It is worth doing if fewer bytes are moved.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.tagging import Tags, put, stand_for
from torchard.functional.programs.tags import SEGMENTS, VAL
from torchard.functional.programs.views import depending_on, is_view
from torchard.functional.torch_internals.operators import aten
from torchard.kernels.patterns.match import Occurrence, Root
from torchard.kernels.rewriting.memory_traffic import moved, moves_nothing, size_of
from torchard.kernels.terms.access import Access
from torchard.kernels.terms.reading import Reading
from torchard.kernels.terms.terms import Term, TermValue, through

__all__ = ["REPLACED", "Part", "Replacement", "Replacer"]

REPLACED = "it has been replaced already"


# What is added to a kernel's result: nodes, how they are read, and factors.
Rest = list[tuple[fx.Node, TermValue, float]]


@dataclass
class Part:
    """One occurrence within a replacement.

    Attributes:
        sources: for each input, the node it is viewed from; None if a product must be inserted for it.
        roots: for each root, the nodes whose users are redirected to the kernel.
        rests: for each root, the other terms of the sum it is part of: nodes, values, factors.
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
        return [nodes[0] for nodes in self.roots]

    @property
    def makers(self) -> list[fx.Node]:
        return [node for nodes in self.roots for node in nodes]

    @property
    def operations(self) -> int:
        """How many nodes that compute something go."""
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
        """How many nodes that compute something go."""
        return sum(part.operations for part in self.parts)

    @property
    def results(self) -> list[fx.Node]:
        """The nodes whose values are read from the kernels afterwards."""
        return [node for part in self.parts for node in part.makers]


@dataclass(frozen=True)
class Refusal:
    """Why an occurrence is left as it is."""

    why: str


class Replacer:
    """Replaces occurrences in a program; the graph changes, the reading of it does not.

    Args:
        wanted: whether a label requires that its value stays in the program.
    """

    def __init__(
        self, reading: Reading, wanted: Callable[[fx.Node], bool] = lambda _: False
    ) -> None:
        self.reading = reading
        self.graph = reading.program.graph
        self.order: dict[fx.Node, float] = {n: i for n, i in reading.order.items()}
        self.erased: set[fx.Node] = set()
        self.turned: dict[fx.Node, fx.Node] = {}  # the node that is read in place of a result
        self.wanted = wanted

    # -- planning -----------------------------------------------------------------------------

    def plan(self, occurrences: Sequence[Occurrence]) -> Replacement:
        """The replacement of some occurrences; changes nothing."""
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

    def _part(self, found: Occurrence) -> Part | Refusal:
        """What replaces an occurrence, or why nothing may."""
        given = {value.term for value in found.inputs}
        made = [(root, self._makers(root.term, root.term in given)) for root in found.roots]
        # A result that equals an input (a bias's gradient) may have no operation of its own.
        kept = [(root, nodes) for root, nodes in made if nodes or root.term not in given]
        makers = [nodes for _, nodes in kept]
        if not makers or not all(makers):
            return Refusal(REPLACED)
        after = depending_on(node for nodes in makers for node in nodes)
        sources = [self._source(value, after) for value in found.inputs]
        if not all(map(self._can_be_had, sources, found.inputs, itertools.repeat(after))):
            return Refusal("an input of it is no value of the program, or depends on its result")
        roots = tuple(root for root, _ in kept)
        rests = self._rests(roots, after)
        if rests is None:
            return Refusal("the rest of a sum it is part of has no value of its own")
        return Part(replace(found, roots=roots), sources, makers, rests)

    def _rests(self, roots: Iterable[Root], after: set[fx.Node]) -> list[Rest] | None:
        """The rest of the sum that each is part of; None if one has no value of its own."""
        found = [self._rest(root, after) for root in roots]
        known = [rest for rest in found if rest is not None]
        return known if len(known) == len(found) else None

    def _can_be_had(self, source: fx.Node | None, value: TermValue, after: set[fx.Node]) -> bool:
        """Whether a node has an input's value, or a biased product of which it is the product."""
        if source is not None:
            return True
        node = self.reading.products.get(value.term)
        return node is not None and after.isdisjoint(node.all_input_nodes[-2:])

    def _refusal(self, plan: Replacement, roots: set[fx.Node]) -> str:
        if any(self.wanted(node) for node in plan.gone - roots):
            return "a value inside of it is asked for by its label"
        for part in plan.parts:
            marks = {SEGMENTS.get(n, ()) for n in part.gone if not moves_nothing(n)}
            if len(marks) > 1:
                return "a checkpoint's edge runs through it"
        return ""

    def _makers(self, term: Term, given: bool = False) -> list[fx.Node]:
        """The nodes that compute a term rather than view it; if it is given, those that recompute it."""
        alive = [n for n in self.reading.nodes[term] if n not in self.erased][given:]
        made = [n for n in alive if n.op == "call_function" and not is_view(n)]
        return [n for n in made if not self._lays_out(n, term)] or made

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
        found: set[fx.Node] = set()
        todo = part.makers
        while todo:
            fresh = (
                {n for n in todo.pop().all_input_nodes if n.op == "call_function"} - found - ends
            )
            found |= fresh
            todo += fresh
        return found

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
        return (as_is or shaped or nodes)[0]

    def _rest(self, root: Root, after: set[fx.Node]) -> Rest | None:
        """What is added to the kernel's result: nodes, how they are read, and factors."""
        if not root.rest:
            return []
        whole = self.reading.first[root.term]
        found = []
        for k in root.rest:
            value = through(whole, k)
            factor = float(root.term.numbers[k])
            if value is None:
                return None
            scaled = self.reading.store.scale(value, factor)
            node = self._source(scaled, after)
            if node is not None:
                found.append((node, scaled, 1.0))
                continue
            node = self._source(value, after)
            if node is None:
                return None
            found.append((node, value, factor))
        return found

    def _gone(self, roots: Sequence[fx.Node], pinned: Collection[Any]) -> set[fx.Node]:
        """The nodes that become dead once the users of some nodes are redirected."""
        gone: set[fx.Node] = set()
        todo = list(roots)
        outputs = {self.graph.output_node()}
        turned = set(roots)
        while todo:
            node = todo.pop()
            if node in gone or node in pinned or node.op != "call_function":
                continue
            if node not in turned and any(u not in gone or u in outputs for u in node.users):
                continue
            gone.add(node)
            todo += node.all_input_nodes
        return gone

    def _weigh(self, plan: Replacement) -> None:
        made: set[Term] = set()
        for part in plan.parts:
            found = part.occurrence
            part.before = sum(map(moved, part.gone))
            part.after = sum(map(_bytes, found.inputs)) + sum(_bytes(r.value) for r in found.roots)
            for node, value in zip(part.sources, found.inputs, strict=True):
                if node is None and value.term not in made:
                    biased = self.reading.products[value.term]
                    part.after += _bytes(value) + sum(map(size_of, biased.all_input_nodes[-2:]))
                    made.add(value.term)
            for root, rest in zip(found.roots, part.rests, strict=True):
                part.after += sum(_bytes(value) + 2 * _bytes(root.value) for _, value, _ in rest)
        plan.before = sum(part.before for part in plan.parts)
        plan.after = sum(part.after for part in plan.parts)

    # -- doing --------------------------------------------------------------------------------

    def carry_out(self, part: Part, fused: Fused, tags: Tags) -> fx.Node:
        """Insert one kernel, and return its node."""
        first = min(part.makers, key=self.order.__getitem__)
        with self.graph.inserting_before(first):
            operands = [
                self._operand(node, value, first)
                for node, value in zip(part.sources, part.occurrence.inputs, strict=True)
            ]
            node = self._call(fused, tuple(operands), first)
            put(node, tags)
            results = self._results(node, part.occurrence, first)
        for i, result in enumerate(results):
            self._turn(part, i, result)
        return node

    def finish(self, plan: Replacement) -> None:
        """Erase the dead nodes of a plan."""
        self._sweep(node for part in plan.parts for node in part.makers)

    def _operand(self, node: fx.Node | None, value: TermValue, like: fx.Node) -> fx.Node:
        if node is not None:
            node = self.turned.get(node, node)
            return self._viewed(node, self.reading.value(node), value, like)
        source = self._source(value, set()) or self._product(value.term)
        return self._viewed(source, self.reading.value(source), value, like)

    def _product(self, term: Term) -> fx.Node:
        """Insert the product of a product with a bias."""
        biased = self.reading.products[term]
        a, b = biased.all_input_nodes[-2:]
        target = aten.mm.default if biased.target is aten.addmm.default else aten.bmm.default
        with self.graph.inserting_before(biased):
            made = self._call(target, (a, b), biased)
        values = self.reading.value(a), self.reading.value(b)
        self.reading.values[made] = self.reading.store.dot(*values, term.dtype)
        self.reading.nodes[term].insert(0, made)
        return made

    def _viewed(self, node: fx.Node, have: TermValue, want: TermValue, like: fx.Node) -> fx.Node:
        """Insert the views by which one value of a term is read from another."""
        if have.access == want.access:
            return node
        if have.access.reshaped(want.shape) == want.access:
            return self._call(aten.reshape.default, (node, list(want.shape)), like)
        node = self._buffer(node, have, like)
        return self._read(node, want.access, want.term.sizes, like)

    def _buffer(self, node: fx.Node, have: TermValue, like: fx.Node) -> fx.Node:
        """Insert views of a node that read the whole buffer of its term in order."""
        order = sorted(range(len(have.shape)), key=lambda d: -have.access.dims[d][1])
        order = [d for d in order if have.access.dims[d][1]] + [
            d for d in order if not have.access.dims[d][1]
        ]
        if order != list(range(len(order))):
            node = self._call(aten.permute.default, (node, order), like)
        dims = [have.access.dims[d] for d in order]
        for d in range(len(dims) - 1, -1, -1):
            if not dims[d][1]:  # an expanded dim is read once
                node = self._call(aten.select.int, (node, d, 0), like)
        return node

    def _read(self, node: fx.Node, access: Access, sizes: Sequence[int], like: fx.Node) -> fx.Node:
        """Insert the views that read a whole buffer by an access."""
        total = 1
        for size in sizes:
            total *= size
        steps = sorted({stride for _, stride in access.dims if stride}, reverse=True)
        radix, outer = [], total
        for step in steps:
            radix.append(outer // step)
            outer = step
        radix.append(outer)
        node = self._call(aten.reshape.default, (node, radix), like)
        offset, starts = access.offset, []
        for size in reversed(radix):
            offset, digit = divmod(offset, size)
            starts.append(digit)
        starts.reverse()
        by_stride = {stride: (d, size) for d, (size, stride) in enumerate(access.dims) if stride}
        for place, step in enumerate(steps):
            d, size = by_stride[step]
            if (starts[place], size) != (0, radix[place]):
                args = (node, place, starts[place], starts[place] + size)
                node = self._call(aten.slice.Tensor, args, like)
        node = self._call(aten.select.int, (node, len(steps), starts[-1]), like)
        dims = [by_stride[step][0] for step in steps]
        if dims != sorted(dims):
            order = sorted(range(len(dims)), key=dims.__getitem__)
            node = self._call(aten.permute.default, (node, order), like)
        for d, (_, stride) in enumerate(access.dims):
            if not stride:
                node = self._call(aten.unsqueeze.default, (node, d), like)
        shape = list(access.shape)
        if tuple(VAL.of(node).shape) != tuple(shape):
            node = self._call(aten.expand.default, (node, shape), like)
        return node

    def _results(self, node: fx.Node, found: Occurrence, like: fx.Node) -> list[fx.Node]:
        """The kernel's results, in the order of the roots."""
        if not isinstance(VAL.of(node), tuple):
            return [node]
        return [self._call(operator.getitem, (node, root.output), like) for root in found.roots]

    def _turn(self, part: Part, i: int, result: fx.Node) -> None:
        """Redirect the users of a root to the kernel's result plus the rest of its sum."""
        root = part.occurrence.roots[i]
        whole = self.reading.first[root.term]
        for old in part.roots[i]:
            want = self.reading.value(old)
            with self.graph.inserting_before(old):
                if root.rest:
                    new = self._summed(part.rests[i], root, result, whole, old)
                    new = self._viewed(new, whole, want, old)
                else:
                    new = self._viewed(result, root.value, want, old)
            stand_for(new, old)
            old.replace_all_uses_with(new)
            self.turned[old] = new
            self.reading.nodes[root.term].insert(0, new)
            self.reading.values[new] = want

    def _summed(
        self,
        rest: Rest,
        root: Root,
        result: fx.Node,
        whole: TermValue,
        like: fx.Node,
    ) -> fx.Node:
        """Insert the sum that a result is part of, in the dims in which its terms are known."""
        shape = list(whole.shape)
        new = result
        if tuple(VAL.of(result).shape) != whole.shape:
            new = self._call(aten.reshape.default, (new, shape), like)
        for node, value, factor in rest:
            other = self._viewed(node, self.reading.value(node), value, like)
            if value.shape != whole.shape:
                other = self._call(aten.reshape.default, (other, shape), like)
            alpha = {} if factor == 1 else {"alpha": factor}
            new = self._call(aten.add.Tensor, (new, other), like, alpha)
        if root.term.numbers[-1]:
            new = self._call(aten.add.Scalar, (new, root.term.numbers[-1]), like)
        return new

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: fx.Node,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Insert a call in place of another node, with its tags."""
        made = add_call(like, target, *args, **kwargs or {})
        self.order[made] = self.order[like] - 0.5
        return made

    def _sweep(self, nodes: Iterable[fx.Node]) -> None:
        """Erase unused nodes among these, and operands that become unused."""
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in self.erased or node.users or node.op != "call_function":
                continue
            todo += node.all_input_nodes
            self.graph.erase_node(node)
            self.erased.add(node)


def _bytes(value: TermValue) -> int:
    return value.access.distinct * value.dtype.itemsize
