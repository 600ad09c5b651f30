"""Near misses: places where most of a kernel's pattern is, and what differs there.

They are computed on demand, where no kernel was used, so that fusing is not slowed down.
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

# The least number of matching operations, and the least fraction of the pattern's.
_LEAST = 2
_PART = 2 / 3
_BINDINGS = 8


@dataclass
class Misses:
    """The near misses of one rewrite, computed when called.

    Args:
        program: the program before the rewrite.
        kernels: the kernels that were looked for.
        concerns: whether a node was to be considered.
        refused: occurrences that were found but not replaced.
        used: the kernels in the program now.
        gone: the names of nodes that were erased.
    """

    program: Program
    kernels: Sequence[Kernel]
    concerns: Callable[[fx.Node], bool]
    refused: list[Missed]
    used: frozenset[str]
    gone: frozenset[str]

    def __call__(self) -> list[Missed]:
        """Refused occurrences, then near misses, in program order."""
        reading = Reading(self.program)
        refused = {miss.source for miss in self.refused}
        best: dict[fx.Node, _Near] = {}
        for near in self._nears(Finder(reading)):
            known = best.get(near.node)
            if near.source not in refused and (known is None or near.likely > known.likely):
                best[near.node] = near
        order = reading.order
        outer = list(_apart(sorted(best.values(), key=lambda near: -order[near.node])))
        misses = [near.report() for near in reversed(outer)]
        return [*self.refused, *(miss for miss in misses if miss is not None)]

    def _nears(self, finder: Finder) -> Iterator[_Near]:
        """Near misses of kernels in the forward, and of gradients of the used kernels in the backward."""
        backward = any(_is_backward(node) for node in self.program.calls)
        used = [kernel for kernel in self.kernels if backward and kernel.name in self.used]
        gradients = [kernel.gradient for kernel in used]
        forward = (kernel for kernel in self.kernels if not kernel.gradient_only)
        for kernel in (*forward, *(g for g in gradients if g is not None)):
            for pattern in kernel.patterns:
                for alternative in pattern.alternatives:
                    yield from self._of(kernel, alternative, finder)

    def _of(self, kernel: Kernel, alternative: Alternative, finder: Finder) -> Iterator[_Near]:
        """The near misses of one alternative of a kernel's pattern."""
        reading, skeleton = finder.reading, alternative.skeleton
        first = skeleton.widest
        root = skeleton.roots[first]
        likeness = Likeness(skeleton)
        distinctive = {term.op for term in skeleton.terms if _is_distinctive(term)}
        for term in finder.candidates(root):
            node = reading.nodes[term][0]
            if node.name in self.gone or not self.concerns(node):
                continue
            if _is_backward(node) != (kernel.of is not None):
                continue
            if not reading.has_most(term, distinctive, likeness.depth):
                continue
            score = likeness.of(root, term)
            if score >= _LEAST and score > _PART * likeness.all:
                near = _Near(kernel, alternative, first, term, node, score, likeness, finder)
                # Gradients are summed: next to a kernel's gradient there is always something similar.
                if kernel.of is None or self.gone.isdisjoint(n.name for n in near.reached()):
                    yield near


@dataclass
class _Near:
    """A place that has most of a pattern's operations."""

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
        """The fraction and the number of matching operations, by which kernels are compared."""
        return self.score / self.likeness.all, self.score

    @property
    def root(self) -> Term:
        """The pattern's root that was compared."""
        return self.alternative.skeleton.roots[self.first]

    @property
    def source(self) -> str:
        return str(SOURCE.get(self.node) or "")

    def reached(self) -> set[fx.Node]:
        """The nodes between the pattern's inputs, as far as they are known, and its output."""
        values, ends = self.finder.reading.values, self.likeness.facing(self.root, self.term)

        def ending(node: fx.Node) -> bool:
            value = values.get(node)
            return isinstance(value, TermValue) and bare(value.term) in ends

        reached, todo = {self.node}, [self.node]
        while todo:
            fresh = {n for n in todo.pop().all_input_nodes if not ending(n)} - reached
            reached |= fresh
            todo += fresh
        return reached

    def report(self) -> Missed | None:
        """The report of this near miss; None if nothing differs (as in one operation that was kept)."""
        self.finder.effort.begin()
        try:
            why = self._why()
        except Exhausted:
            why = "too many values look alike to say what differs"
        matched = f"{self.score} of its {self.likeness.all} operations match"
        return Missed.of(self.kernel.name, self.node, f"{why} ({matched})") if why else None

    def _why(self) -> str:
        """The differences; empty if there are none."""
        parting = self.likeness.parting(self.root, self.term)
        if parting is not None:
            p, t = parting
            if p.op == t.op:
                here, wanted = len(t.operands), len(p.operands)
                return f"{spoken(t)} of {here} values where the pattern's is of {wanted}"
            return f"{spoken(t)} where the pattern has {spoken(p)}"
        unifier = self.finder.unifier(self.alternative)
        bindings = list(itertools.islice(unifier.at(self.first, self.term), _BINDINGS))
        if not bindings:
            return "values differ that are one input in the pattern"
        complete = [b for b in bindings if len(b.inputs) == len(self.alternative.skeleton.inputs)]
        if not complete:
            return "another output of the pattern does not occur"
        verifier = self.finder.verifier
        for binding in complete:
            value = verifier.returned(self.alternative, self.first, self.term, binding)
            if value is not None:
                return "" if value.term is self.term else difference(value.term, self.term)
        return "its dims do not correspond as in the pattern"


def _is_backward(node: fx.Node) -> bool:
    return PHASE.get(node) == "backward"


def _is_distinctive(term: Term) -> bool:
    """Whether a term's operation is distinctive; arithmetic is not."""
    return is_firm(term) or (isinstance(term.op, tuple) and term.op[0] == "reduce")


def _apart(nears: Sequence[_Near]) -> Iterator[_Near]:
    """The near misses that are not within an earlier one."""
    inside: set[fx.Node] = set()
    for near in nears:
        if near.node not in inside:
            inside |= near.reached()
            yield near
