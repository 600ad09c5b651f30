"""Match plans: the order in which a pattern's inputs are bound, and what can be checked after each.

A wrong input is detected where it is read: if the program never multiplies two values, no choice of the
other inputs makes their product occur. So inputs are bound one after another; terms that depend only on
bound inputs are evaluated at once, and those that are *firm* must be in the program already.
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
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import Term, TermValue

__all__ = ["Course", "MatchPlan", "MatchStep", "is_firm"]

# Operations whose terms can be absorbed into others, so that they need not be terms of the program.
_DISSOLVE = ("input", "constant", "sum", "product", "cast", "copy")


@dataclass(frozen=True, eq=False)
class MatchStep:
    """One input, and the nodes that can be evaluated once it is bound.

    Attributes:
        number: the number of the input.
        nodes, firm: the nodes in order, and those among them whose terms must be in the program.
        decided: whether the output is known after this step.
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
        """The steps that determine an output as early as possible."""
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
        """The numbers of the inputs, in the order in which some nodes read them."""
        numbers = {node: i for i, node in enumerate(self.program.placeholders)}
        order: dict[int, None] = {}
        for end in ends:
            read = self._before([end])
            order.update((i, None) for node, i in numbers.items() if node in read)
        return list(dict.fromkeys((*order, *numbers.values())))

    def _before(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes that some nodes depend on, these included."""
        before, todo = set(nodes), list(nodes)
        while todo:
            fresh = set(todo.pop().all_input_nodes) - before
            before |= fresh
            todo += fresh
        return before

    def _follow(self, known: set[fx.Node]) -> list[fx.Node]:
        """The further nodes that can be evaluated, which are added to ``known``."""
        following = []
        for node in self.program.calls:
            if node not in known and known.issuperset(node.all_input_nodes):
                known.add(node)
                following.append(node)
        return following

    def _firm(self, result: fx.Node) -> set[fx.Node]:
        """The nodes whose term is part of the result's term, neither absorbed nor cancelled."""
        kept = {term for term in inside([self._values[result].term]) if is_firm(term)}
        values = self._values.items()
        return {n for n, value in values if isinstance(value, TermValue) and bare(value.term) in kept}

    @cached_property
    def _values(self) -> dict[fx.Node, TermValue]:
        """The values of all nodes, for inputs of which nothing is known."""
        store = Store()
        vals = [VAL.of(node) for node in self.program.placeholders]
        leaves = [store.leaf(i, val.shape, val.dtype) for i, val in enumerate(vals)]
        return evaluate(self.program.graph, leaves, store)


def is_firm(term: Term) -> bool:
    """Whether a term is never absorbed, whatever reads it."""
    return term.op not in _DISSOLVE and not isinstance(term.op, tuple)
