"""Near misses: what is almost a kernel's pattern, and what is different there.

Looked for when somebody asks, where no kernel has come: fusing is none the slower for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import PHASE, SOURCE
from torchard.kernels.patterns.effort import Exhausted
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Finder
from torchard.kernels.patterns.match_plan import is_firm
from torchard.kernels.patterns.pattern import Alternative
from torchard.kernels.patterns.similarity import Likeness, difference, spoken
from torchard.kernels.rewriting.report import Missed
from torchard.kernels.terms.reading import Reading, bare
from torchard.kernels.terms.terms import Term, TermValue

__all__ = ["Misses"]

# Operations that have to be there, and more than which part of the pattern's: less is everywhere.
_LEAST = 2
_PART = 2 / 3
_BINDINGS = 8


@dataclass
class Misses:
    """What a rewrite has left alone.

    Args:
        program: as it was. kernels: those looked for. concerns: which nodes were meant.
        refused: occurrences that were found and not replaced.
        used: the kernels that stand there now. gone: the names of nodes that do not any more.
    """

    program: Program
    kernels: Sequence[Kernel]
    concerns: Callable[[fx.Node], bool]
    refused: list[Missed]
    used: frozenset[str]
    gone: frozenset[str]

    def __call__(self) -> list[Missed]:
        """Those that were refused, then what was not found, in the order of the program."""
        reading = Reading(self.program)
        refused = {one.source for one in self.refused}
        best: dict[fx.Node, _Near] = {}
        for near in self._nears(Finder(reading)):
            known = best.get(near.node)
            if near.source not in refused and (known is None or near.likely > known.likely):
                best[near.node] = near
        order = reading.order
        outer = list(_apart(sorted(best.values(), key=lambda near: -order[near.node])))
        said = [near.said() for near in reversed(outer)]
        return [*self.refused, *(one for one in said if one is not None)]

    def _nears(self, finder: Finder) -> Iterator[_Near]:
        """Of kernels in the forward, and in the backward of the gradients of those in use."""
        backward = any(_is_backward(node) for node in self.program.calls)
        used = [kernel for kernel in self.kernels if backward and kernel.name in self.used]
        gradients = [kernel.gradient for kernel in used]
        for kernel in (*self.kernels, *(one for one in gradients if one is not None)):
            for pattern in kernel.patterns:
                for alternative in pattern.alternatives:
                    yield from self._of(kernel, alternative, finder)

    def _of(self, kernel: Kernel, alternative: Alternative, finder: Finder) -> Iterator[_Near]:
        reading, skeleton = finder.reading, alternative.skeleton
        first = skeleton.widest
        root = skeleton.roots[first]
        likeness = Likeness(skeleton)
        telling = {term.op for term in skeleton.terms if _tells(term)}
        for term in finder.candidates(root):
            node = reading.nodes[term][0]
            if node.name in self.gone or not self.concerns(node):
                continue
            if _is_backward(node) != (kernel.of is not None):
                continue
            if not reading.has_most(term, telling, likeness.depth):
                continue
            score = likeness.of(root, term)
            if score >= _LEAST and score > _PART * likeness.all:
                near = _Near(kernel, alternative, first, term, node, score, likeness, finder)
                # A gradient adds to others: around those of kernels there is always something like it.
                if kernel.of is None or self.gone.isdisjoint(n.name for n in near.reached()):
                    yield near


@dataclass
class _Near:
    """A place where most of a pattern's operations are."""

    kernel: Kernel
    alternative: Alternative
    first: int
    term: Term
    node: fx.Node
    score: int
    likeness: Likeness
    finder: Finder

    @property
    def likely(self) -> tuple[float, int]:
        return self.score / self.likeness.all, self.score

    @property
    def root(self) -> Term:
        """Of the pattern."""
        return self.alternative.skeleton.roots[self.first]

    @property
    def source(self) -> str:
        return str(SOURCE.get(self.node) or "")

    def reached(self) -> set[fx.Node]:
        """What lies between the pattern's inputs, as far as it goes, and its output."""
        values, ends = self.finder.reading.values, self.likeness.facing(self.root, self.term)

        def ending(node: fx.Node) -> bool:
            value = values.get(node)
            return isinstance(value, TermValue) and bare(value.term) in ends

        found, todo = {self.node}, [self.node]
        while todo:
            fresh = {n for n in todo.pop().all_input_nodes if not ending(n)} - found
            found |= fresh
            todo += fresh
        return found

    def said(self) -> Missed | None:
        """None if it is not missed: what is one operation already, fusing leaves alone."""
        self.finder.effort.begin()
        try:
            why = self._why()
        except Exhausted:
            why = "too many values look alike to say what differs"
        matched = f"{self.score} of its {self.likeness.all} operations are there"
        return Missed.of(self.kernel.name, self.node, f"{why} ({matched})") if why else None

    def _why(self) -> str:
        """What is different; empty if nothing is."""
        apart = self.likeness.parting(self.root, self.term)
        if apart is not None:
            p, t = apart
            if p.op == t.op:
                here, wanted = len(t.operands), len(p.operands)
                return f"{spoken(t)} of {here} values where the pattern's is of {wanted}"
            return f"{spoken(t)} where the pattern has {spoken(p)}"
        unifier = self.finder.unifier(self.alternative)
        bindings = list(itertools.islice(unifier.at(self.first, self.term), _BINDINGS))
        if not bindings:
            return "values differ that are one in the pattern"
        whole = [b for b in bindings if len(b.inputs) == len(self.alternative.skeleton.inputs)]
        if not whole:
            return "another result of the pattern's is not here"
        verifier = self.finder.verifier
        for binding in whole:
            value = verifier.returned(self.alternative, self.first, self.term, binding)
            if value is not None:
                return "" if value.term is self.term else difference(value.term, self.term)
        return "its dims do not go together as the pattern's"


def _is_backward(node: fx.Node) -> bool:
    return PHASE.get(node) == "backward"


def _tells(term: Term) -> bool:
    """Whether an operation is more than arithmetic, which is everywhere."""
    return is_firm(term) or (isinstance(term.op, tuple) and term.op[0] == "reduce")


def _apart(nears: Sequence[_Near]) -> Iterator[_Near]:
    """Those that are not on the way to one before them."""
    inside: set[fx.Node] = set()
    for near in nears:
        if near.node not in inside:
            inside |= near.reached()
            yield near
