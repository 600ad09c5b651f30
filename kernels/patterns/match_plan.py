"""Course: in which order a pattern's inputs are tried, and what is known after each of them.

A wrong input shows where it is read: a product of two values that the program never multiplies is
nothing that the rest of the pattern could make right. So inputs are chosen one after another, what they
suffice for is evaluated at once, and what is *firm* of it has to be in the program already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.kernels.terms.evaluate import evaluate
from torchard.kernels.terms.reading import bare, inside
from torchard.kernels.terms.terms import Store, Term, TermValue

__all__ = ["Course", "MatchPlan", "MatchStep", "is_firm"]

# What other terms may take up into themselves, so that it need not be a term of the program.
_DISSOLVE = ("input", "constant", "sum", "product", "cast", "copy")


@dataclass(frozen=True, eq=False)
class MatchStep:
    """One input, and what can be computed once it is known.

    Attributes:
        number: of the input.
        nodes: in order; firm: those of them that have to be in the program.
        decided: whether the output is known after this.
    """

    number: int
    nodes: tuple[fx.Node, ...]
    firm: frozenset[fx.Node]
    decided: bool


Course = tuple[MatchStep, ...]


class MatchPlan:
    """A pattern's program at some shapes, to be evaluated on many values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._courses: dict[int, Course] = {}

    def course(self, output: int) -> Course:
        """That which decides an output first."""
        if output not in self._courses:
            self._courses[output] = self._course(self.program.results[output])
        return self._courses[output]

    def _course(self, result: fx.Node) -> Course:
        firm = self._firm(result) & self._before([result])
        ends = [*[n for n in self.program.calls if n in firm], result, *self.program.results]
        order = self._inputs(ends)
        known: set[fx.Node] = set()
        steps = []
        for number in order:
            known.add(self.program.placeholders[number])
            nodes = self._follow(known)
            steps.append(MatchStep(number, tuple(nodes), frozenset(nodes) & firm, result in known))
        return tuple(steps)

    def _inputs(self, ends: Iterable[fx.Node]) -> list[int]:
        """The numbers of the inputs, those that the first of some nodes read first."""
        numbers = {node: i for i, node in enumerate(self.program.placeholders)}
        found: dict[int, None] = {}
        for end in ends:
            read = self._before([end])
            found.update((i, None) for node, i in numbers.items() if node in read)
        return list(dict.fromkeys((*found, *numbers.values())))

    def _before(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """What nodes depend on, themselves included."""
        found, todo = set(nodes), list(nodes)
        while todo:
            fresh = set(todo.pop().all_input_nodes) - found
            found |= fresh
            todo += fresh
        return found

    def _follow(self, known: set[fx.Node]) -> list[fx.Node]:
        """What can be computed besides, which is known from then on."""
        found = []
        for node in self.program.calls:
            if node not in known and known.issuperset(node.all_input_nodes):
                known.add(node)
                found.append(node)
        return found

    def _firm(self, result: fx.Node) -> set[fx.Node]:
        """The nodes whose value is inside of a result's as it is, not taken apart or cancelled."""
        kept = {term for term in inside([self._values[result].term]) if is_firm(term)}
        values = self._values.items()
        return {n for n, value in values if isinstance(value, TermValue) and bare(value.term) in kept}

    @cached_property
    def _values(self) -> dict[fx.Node, TermValue]:
        """Of inputs of which nothing is known."""
        store = Store()
        vals = [VAL.of(node) for node in self.program.placeholders]
        leaves = [store.leaf(i, val.shape, val.dtype) for i, val in enumerate(vals)]
        return evaluate(self.program.graph, leaves, store)


def is_firm(term: Term) -> bool:
    """Whether it stays what it is, whatever reads it."""
    return term.op not in _DISSOLVE and not isinstance(term.op, tuple)
