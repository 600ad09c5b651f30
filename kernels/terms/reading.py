"""A program read as terms: the value of each node, and the nodes of each term."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.markers import is_marker
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import PHASE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.kernels.terms.evaluate import evaluate
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import Term, TermValue, is_multiple, is_power, literal

__all__ = ["Reading", "bare", "factors_of", "inside", "operations"]

_BIASED = (aten.addmm.default, aten.baddbmm.default)
_ONES = (aten.ones_like.default, aten.ones.default)
_FULL = (aten.full.default, aten.full_like.default)


def factors_of(biased: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The factors of a product with a bias; both may be the same node."""
    _, a, b = biased.args[:3]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def bare(term: Term) -> Term:
    """A term without the casts and factors around it, for comparison with skeletons."""
    while term.op == "cast" or is_multiple(term):
        term = term.operands[0][0]
    return term


def inside(terms: Iterable[Term]) -> frozenset[Term]:
    """Some terms and all terms that they read, directly or indirectly."""
    reached = set(terms)
    todo = list(reached)
    while todo:
        fresh = {operand for operand, _ in todo.pop().operands} - reached
        reached |= fresh
        todo += fresh
    return frozenset(reached)


def _seeds(program: Program) -> set[fx.Node]:
    """The seed cotangents of a backward. If they were read as the number 1, products would lose them."""
    return {
        node
        for node in program.calls
        if (node.target in _ONES or (node.target in _FULL and node.args[1] == 1))
        and all(PHASE.get(user) == "backward" for user in node.users)
    }


def operations(term: Term, depth: int, known: dict[Any, frozenset[Any]]) -> frozenset[Any]:
    """The operations within ``depth`` steps of a term, without casts and factors; cached in ``known``."""
    term = bare(term)
    ops = known.get((term, depth))
    if ops is None:
        inner = [operations(operand, depth - 1, known) for operand, _ in term.operands if depth]
        ops = known[term, depth] = frozenset({term.op}).union(*inner)
    return ops


class Reading:
    """The terms of a program. Code that inserts nodes in its graph adds them to `values` and `nodes`.

    Attributes:
        values: the value of each node; a tuple of values for a node with several results.
        nodes: the nodes of each term, the earliest first.
        by_op: the terms of each operation, without casts and factors.
        first: the value of each term's earliest node.
        multiples: the multiples, and the powers, of each term that have nodes.
        products: product -> the node that computes the product together with a bias.
        order: the positions of the nodes.
        casts: whether the program has casts, which separate sums and products.
        behind: the nodes that depend on a cotangent.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.store = Store()
        inputs = [
            self.store.leaf(i, VAL.of(node).shape, VAL.of(node).dtype)
            for i, node in enumerate(program.placeholders)
        ]
        # Values that enter or leave a loop depend on the other iterations.
        leaves = _seeds(program) | {node for node in program.calls if is_marker(node)}
        values = evaluate(program.graph, inputs, self.store, sharing=True, leaves=leaves)
        self.values: dict[fx.Node, Any] = values
        self.nodes: dict[Term, list[fx.Node]] = defaultdict(list)
        self.by_op: dict[Any, list[Term]] = defaultdict(list)
        self.order = {node: i for i, node in enumerate(program.graph.nodes)}
        for node, value in values.items():
            if isinstance(value, TermValue) and literal(value) is None:
                if value.term not in self.nodes:
                    self.by_op[bare(value.term).op].append(value.term)
                self.nodes[value.term].append(node)
        self.first = {term: values[nodes[0]] for term, nodes in self.nodes.items()}
        self.multiples: dict[Term, list[Term]] = defaultdict(list)
        for term in self.nodes:
            if is_multiple(term) or is_power(term):
                self.multiples[term.operands[0][0]].append(term)
        self.products = self._products()
        self.casts = self.store.casts
        self.behind = self._behind()

    @property
    def device(self) -> torch.device:
        """The device of the program's first input."""
        placeholders = self.program.placeholders
        return VAL.of(placeholders[0]).device if placeholders else torch.device("cpu")

    def _behind(self) -> set[fx.Node]:
        """The nodes that depend on a cotangent."""
        leaves = zip(self.program.placeholders, self.program.inputs, strict=False)
        behind = {node for node, leaf in leaves if leaf.role == "cotangent"}
        for node in self.program.calls:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return behind

    def _products(self) -> dict[Term, fx.Node]:
        """Products inside products with a bias: they have no nodes, but nodes can be inserted."""
        products: dict[Term, fx.Node] = {}
        for node in self.program.calls:
            if node.target in _BIASED:
                a, b = map(self.value, factors_of(node))
                term = bare(self.store.dot(a, b, VAL.of(node).dtype).term)
                products.setdefault(term, node)
        return products

    def value(self, node: fx.Node) -> TermValue:
        """The value of a node with one result."""
        value: TermValue = self.values[node]
        return value

    def may_be(self, term: Term, needed: Sequence[frozenset[Any]]) -> bool:
        """Whether a term has operations ``needed[0]`` within 1 step, ``needed[1]`` within 2, ..."""
        return all(
            ops <= operations(term, depth, self._operations) for depth, ops in enumerate(needed, 1)
        )

    def has_most(self, term: Term, wanted: Collection[Any], depth: int) -> bool:
        """Whether at least half of the wanted operations are within ``depth`` steps of a term."""
        ops = operations(term, depth, self._operations)
        return 2 * sum(op in ops for op in wanted) >= len(wanted)

    @cached_property
    def _operations(self) -> dict[Any, frozenset[Any]]:
        return {}

    def readers(self, term: Term, op: Any) -> list[Term]:
        """The terms that apply an operation to a term; casts and factors around both are ignored."""
        return [reader for reader in self._readers.get(bare(term), ()) if bare(reader).op == op]

    @cached_property
    def _readers(self) -> dict[Term, list[Term]]:
        """The readers of every term, including readers without a node."""
        readers: dict[Term, dict[Term, None]] = defaultdict(dict)
        todo, seen = list(self.nodes), set(self.nodes)
        while todo:
            term = todo.pop()
            for operand, _ in term.operands:
                if operand not in seen:
                    seen.add(operand)
                    todo.append(operand)
            for operand, _ in bare(term).operands:
                readers[bare(operand)][term] = None
        return {term: list(terms) for term, terms in readers.items()}

    def read_as(self, term: Term) -> list[TermValue]:
        """The values by which the program's nodes read a term."""
        return list(dict.fromkeys(self.value(node) for node in self.nodes.get(term, ())))
