"""Matching: propose by skeleton, verify by evaluation.

A proposal binds a pattern's inputs to values of the program. It is a match if the pattern, evaluated on
them, is in the program (verify.py). So shapes, strides, dtypes, numbers and data edges are all checked at
once, and a match is a proof, up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchard.functional.programs.tags import SCOPE, SOURCE
from torchard.kernels.patterns.effort import Effort, Exhausted
from torchard.kernels.patterns.pattern import Alternative, Pattern
from torchard.kernels.patterns.similarity import spoken
from torchard.kernels.patterns.skeleton import Skeleton
from torchard.kernels.patterns.unify import Binding, Unifier
from torchard.kernels.patterns.verify import Occurrence, Root, Verifier
from torchard.kernels.terms.reading import Reading, bare
from torchard.kernels.terms.terms import Term

__all__ = ["Finder", "Miss", "Occurrence", "Root"]

_COMBINATIONS = 48
_PLACES = 512  # places tried for the other outputs, whose numbers multiply
_BETTER = 4  # further bindings tried to find more outputs


@dataclass(frozen=True)
class Miss:
    """The nearest miss of a pattern, and where it differs."""

    pattern: Pattern
    depth: float
    node: fx.Node | None
    why: str

    def __str__(self) -> str:
        if self.node is None:
            return self.why
        where = SOURCE.get(self.node) or self.node.name
        scope = SCOPE.get(self.node)
        return f"the nearest miss is {where}{f' (scope {scope})' if scope else ''}: {self.why}"


class Finder:
    """A search for patterns in one program.

    Args:
        reading: the reading of the program.
        thorough: skip no candidate, even where no match is possible, to report the nearest miss.
        patience: a factor on the effort per pattern.

    Attributes:
        stopped: the patterns whose search was given up because it exceeded its number of steps.
    """

    def __init__(self, reading: Reading, thorough: bool = False, patience: int = 1) -> None:
        self.reading = reading
        self.thorough = thorough
        self.effort = Effort(len(reading.nodes), patience)
        self.stopped: list[Pattern] = []
        self.misses: dict[Pattern, Miss] = {}
        self.operations = reading.store.operations
        self.verifier = Verifier(reading, self.effort)

    def find(
        self,
        pattern: Pattern,
        *,
        partly: bool = False,
        least: int = 0,
        known: Collection[Term] = (),
    ) -> list[Occurrence]:
        """All occurrences, in the order of their first roots.

        Args:
            partly: whether some of the outputs suffice, as for gradients, not all of which may be used.
            least: the elements of the output that depends on most inputs, at least.
            known: outputs of occurrences that need not be found again.
        """
        occurrences: dict[Any, Occurrence] = {}
        self.effort.begin()
        try:
            for alternative in pattern.alternatives:
                for occurrence in self._alternative(alternative, partly, least, known):
                    key = tuple((root.output, root.term) for root in occurrence.roots)
                    occurrences.setdefault(key, occurrence)
        except Exhausted:
            self.stopped.append(pattern)
        return sorted(occurrences.values(), key=lambda o: self._place(o.roots[0].term))

    def _place(self, term: Term) -> int:
        return self.reading.order[self.reading.nodes[term][0]]

    def _alternative(
        self, alternative: Alternative, partly: bool, least: int, known: Collection[Term]
    ) -> Iterator[Occurrence]:
        seen = set(known)
        if not (self.thorough or alternative.skeleton.operations <= self.operations):
            return
        yield from self._by_skeleton(alternative, alternative.skeleton, partly, least, seen)
        if self.reading.casts and alternative.half is not None:
            yield from self._by_skeleton(alternative, alternative.half, partly, least, seen)

    def _by_skeleton(
        self,
        alternative: Alternative,
        skeleton: Skeleton,
        partly: bool,
        least: int,
        seen: set[Any],
    ) -> Iterator[Occurrence]:
        unifier = self.unifier(alternative, skeleton)
        firsts = _by_inputs(skeleton)
        # For gradients, any output that reads all inputs will do; other outputs locate the rest.
        for first in [j for j, reads in firsts if partly and reads == firsts[0][1]] or [
            firsts[0][0]
        ]:
            for term in self.candidates(skeleton.roots[first]):
                # The nearest miss is reported where nothing is found: then no candidate is skipped.
                apt = self.thorough or self.reading.may_be(term, unifier.needs(first))
                if term in seen or not apt or math.prod(term.sizes) < least:
                    continue
                occurrence = self._at(alternative, unifier, first, term, None if partly else seen)
                if occurrence is not None:
                    seen.update(root.term for root in occurrence.roots)
                    yield occurrence
        self._missed(alternative.pattern, unifier)

    def unifier(self, alternative: Alternative, skeleton: Skeleton | None = None) -> Unifier:
        """The unifier that proposes bindings of a pattern, by its skeleton or by a given one."""
        weights = alternative.pattern.weights
        return Unifier(
            skeleton or alternative.skeleton,
            self.reading,
            alternative.predicates,
            self.effort,
            weights,
        )

    def candidates(self, root: Term) -> list[Term]:
        """The terms that a root might be."""
        op = bare(root).op
        if getattr(op, "namespace", "") == "torchard_pattern":
            return list(self.reading.nodes)
        return self.reading.by_op.get(op, [])

    def _at(
        self,
        alternative: Alternative,
        unifier: Unifier,
        first: int,
        term: Term,
        seen: Collection[Term] | None,
    ) -> Occurrence | None:
        """The occurrence by the first binding that gives all outputs, or the one that gives most.

        Args:
            seen: the outputs of other occurrences, which this one cannot have; None if the occurrence
                may have some outputs only, and terms of sums as outputs.
        """
        partly, taken = seen is None, {term, *(seen or ())}
        best, tries, places = None, _COMBINATIONS, itertools.count()
        for binding in itertools.islice(unifier.at(first, term), _COMBINATIONS):
            for bound in self._completed(unifier, first, taken, binding, places):
                occurrence = self.verifier.verified(alternative, first, term, bound, partly)
                if occurrence is not None and (best is None or len(occurrence.roots) > len(best.roots)):
                    best, tries = occurrence, min(tries, _BETTER)
                tries -= 1
                if best is not None and (not tries or best.is_whole):
                    return best
        return best

    def _completed(
        self,
        unifier: Unifier,
        first: int,
        taken: Collection[Term],
        binding: Binding,
        places: Iterator[int],
    ) -> Iterator[Binding]:
        """Extend bindings by the inputs that only other outputs read, wherever those may be."""
        skeleton = unifier.skeleton
        todo = [j for j in range(len(skeleton.roots)) if j != first]

        def extend(binding: Binding, todo: Sequence[int], taken: set[Term]) -> Iterator[Binding]:
            if len(binding.inputs) == len(skeleton.inputs):
                yield binding
                return
            for at, j in enumerate(todo):
                for known in unifier.candidates(j, binding):
                    if bare(known) in taken or not self.reading.may_be(known, unifier.needs(j)):
                        continue
                    if next(places) > _PLACES:
                        return
                    for bound in unifier.at(j, known, binding):
                        if len(bound.inputs) > len(binding.inputs):
                            yield from extend(bound, todo[at + 1 :], taken | {bare(known)})

        yield from itertools.islice(extend(binding, todo, set(map(bare, taken))), _COMBINATIONS)

    def _missed(self, pattern: Pattern, unifier: Unifier) -> None:
        known = self.misses.get(pattern)
        if known is not None and known.depth >= unifier.best:
            return
        if unifier.reached is None:
            self.misses[pattern] = Miss(pattern, 0, None, "its last operation does not occur")
            return
        p, t = unifier.reached
        nodes = self.reading.nodes.get(t)
        self.misses[pattern] = Miss(
            pattern,
            unifier.best,
            nodes[0] if nodes else None,
            f"{spoken(t)} where the pattern has {spoken(p)}"
            if t.op != p.op
            else f"{spoken(t)} agrees, but its dims, numbers or operands differ",
        )


def _by_inputs(skeleton: Skeleton) -> list[tuple[int, int]]:
    """Outputs with the number of inputs they depend on, in descending order of that number."""
    counts = [(j, len(skeleton.reads(root))) for j, root in enumerate(skeleton.roots)]
    return sorted(counts, key=lambda item: -item[1])
