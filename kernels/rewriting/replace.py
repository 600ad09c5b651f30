"""Replacement: users of an occurrence's results read a kernel's instead; dead nodes are erased."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.tagging import Tags, put, stand_for
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.kernels.patterns.match import Occurrence, Root
from torchard.kernels.rewriting.plan import Part, Planner, Replacement, Rest
from torchard.kernels.terms.access import Access
from torchard.kernels.terms.reading import Reading, factors_of
from torchard.kernels.terms.terms import Term, TermValue

__all__ = ["Replacer"]


class Replacer(Planner):
    """Plans replacements in a program, and carries them out.

    The graph changes. The reading keeps its terms; inserted nodes are added to it.

    Attributes:
        order: the positions of the nodes; an inserted node comes just before the one it was inserted for.
        turned: for each redirected result, the node that is read in its place.
        inserted: the nodes that were inserted since the last replacement was finished or undone.
    """

    def __init__(
        self, reading: Reading, wanted: Callable[[fx.Node], bool] = lambda _: False
    ) -> None:
        super().__init__(reading, wanted)
        self.order: dict[fx.Node, float] = {n: i for n, i in reading.order.items()}
        self.turned: dict[fx.Node, fx.Node] = {}
        self.inserted: list[fx.Node] = []
        # The redirected results, and the arguments that their users had.
        self._redirected: list[tuple[fx.Node, list[tuple[fx.Node, Any, Any]], Term]] = []

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
            self._redirect(part, i, result)
        return node

    def finish(self, plan: Replacement) -> None:
        """Erase the dead nodes of a plan."""
        self._sweep(node for part in plan.parts for node in part.makers)
        self.inserted, self._redirected = [], []

    def undo(self) -> None:
        """Erase what was inserted for a plan that is not finished."""
        for old, users, term in reversed(self._redirected):
            new = self.turned.pop(old)
            for user, args, kwargs in users:
                user.args, user.kwargs = args, kwargs
            self._forget(new, term)
        for node in reversed(self.inserted):
            if node in self.reading.values:  # a product that a bias was added to
                self._forget(node, self.reading.values[node].term)
            self.graph.erase_node(node)
        self.inserted, self._redirected = [], []

    def _forget(self, node: fx.Node, term: Term) -> None:
        nodes = self.reading.nodes[term]
        nodes.remove(node)
        if not nodes:
            del self.reading.nodes[term]
        self.reading.values.pop(node, None)

    def _operand(self, node: fx.Node | None, value: TermValue, like: fx.Node) -> fx.Node:
        if node is not None:
            node = self.turned.get(node, node)
            return self._viewed(node, self.reading.value(node), value, like)
        source = self._source(value, set()) or self._product(value.term)
        return self._viewed(source, self.reading.value(source), value, like)

    def _product(self, term: Term) -> fx.Node:
        """Insert the product that a product with a bias adds the bias to."""
        biased = self.reading.products[term]
        a, b = factors_of(biased)
        target = aten.mm.default if biased.target is aten.addmm.default else aten.bmm.default
        with self.graph.inserting_before(biased):
            product = self._call(target, (a, b), biased)
        values = self.reading.value(a), self.reading.value(b)
        self.reading.values[product] = self.reading.store.dot(*values, term.dtype)
        self.reading.nodes[term].insert(0, product)
        return product

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

    def _results(self, node: fx.Node, occurrence: Occurrence, like: fx.Node) -> list[fx.Node]:
        """The kernel's results, in the order of the roots."""
        if not isinstance(VAL.of(node), tuple):
            return [node]
        return [self._call(operator.getitem, (node, root.output), like) for root in occurrence.roots]

    def _redirect(self, part: Part, i: int, result: fx.Node) -> None:
        """Redirect the users of a root to the kernel's result plus the rest of its sum."""
        root = part.occurrence.roots[i]
        total = self.reading.first[root.term]
        for old in part.roots[i]:
            want = self.reading.value(old)
            with self.graph.inserting_before(old):
                if root.rest:
                    new = self._summed(part.rests[i], root, result, total, old)
                    new = self._viewed(new, total, want, old)
                else:
                    new = self._viewed(result, root.value, want, old)
            stand_for(new, old)
            users = [(user, user.args, user.kwargs) for user in old.users]
            self._redirected.append((old, users, root.term))
            old.replace_all_uses_with(new)
            self.turned[old] = new
            self.reading.nodes[root.term].insert(0, new)
            self.reading.values[new] = want

    def _summed(
        self,
        rest: Rest,
        root: Root,
        result: fx.Node,
        total: TermValue,
        like: fx.Node,
    ) -> fx.Node:
        """Insert the sum that a result is part of, in the dims in which its terms are known."""
        shape = list(total.shape)
        new = result
        if tuple(VAL.of(result).shape) != total.shape:
            new = self._call(aten.reshape.default, (new, shape), like)
        for node, value, factor in rest:
            other = self._viewed(node, self.reading.value(node), value, like)
            if value.shape != total.shape:
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
        node = add_call(like, target, *args, **kwargs or {})
        self.order[node] = self.order[like] - 0.5
        self.inserted.append(node)
        return node

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
