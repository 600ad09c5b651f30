"""Matching: propose by skeleton, verify by evaluation.

A proposal says what a pattern's inputs might be. What makes it a match is that the pattern, evaluated on
them, is in the program (verify.py). So shapes, strides, dtypes, numbers and data edges are all checked at
once, and a match is a proof, up to rounding.
"""

from __future__ import annotations

import itertools
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
_PLACES = 512  # tried for the other outputs: those side by side multiply
_BETTER = 4  # bindings tried for one that gives more outputs


@dataclass(frozen=True)
class Miss:
    """What came nearest to a match, and where it went wrong."""

    pattern: Pattern
    depth: float
    node: fx.Node | None
    why: str

    def __str__(self) -> str:
        if self.node is None:
            return self.why
        where = SOURCE.get(self.node) or self.node.name
        scope = SCOPE.get(self.node)
        return f"{where}{f' (scope {scope})' if scope else ''}: {self.why}"


class Finder:
    """Looks for patterns in one program.

    Args:
        reading: of the program.
        thorough: to say what came nearest, look where nothing can be, too.
        patience: how many times the usual effort a pattern is worth.

    Attributes:
        stopped: the patterns whose search took as many steps as it may, and was given up.
    """

    def __init__(self, reading: Reading, thorough: bool = False, patience: int = 1) -> None:
        self.reading = reading
        self.thorough = thorough
        self.effort = Effort(len(reading.nodes), patience)
        self.stopped: list[Pattern] = []
        self.misses: dict[Pattern, Miss] = {}
        self.operations = reading.store.operations
        self.verifier = Verifier(reading, self.effort)

    def find(self, pattern: Pattern, *, partly: bool = False) -> list[Occurrence]:
        """All occurrences, by the place of their first root.

        Args:
            partly: some of the outputs are enough, as of gradients that nobody may want all of.
        """
        found: dict[Any, Occurrence] = {}
        self.effort.begin()
        try:
            for alternative in pattern.alternatives:
                for one in self._alternative(alternative, partly):
                    key = tuple((root.output, root.term) for root in one.roots)
                    found.setdefault(key, one)
        except Exhausted:
            self.stopped.append(pattern)
        return sorted(found.values(), key=lambda f: self._place(f.roots[0].term))

    def _place(self, term: Term) -> int:
        return self.reading.order[self.reading.nodes[term][0]]

    def _alternative(self, alternative: Alternative, partly: bool) -> Iterator[Occurrence]:
        seen: set[Any] = set()
        if not (self.thorough or alternative.skeleton.operations <= self.operations):
            return
        yield from self._by_skeleton(alternative, alternative.skeleton, partly, seen)
        if self.reading.casts and alternative.half is not None:
            yield from self._by_skeleton(alternative, alternative.half, partly, seen)

    def _by_skeleton(
        self, alternative: Alternative, skeleton: Skeleton, partly: bool, seen: set[Any]
    ) -> Iterator[Occurrence]:
        unifier = self.unifier(alternative, skeleton)
        firsts = _by_inputs(skeleton)
        # Of gradients, each that reads everything will do; another output says where the rest may be.
        for first in [j for j, reads in firsts if partly and reads == firsts[0][1]] or [
            firsts[0][0]
        ]:
            for term in self.candidates(skeleton.roots[first]):
                # What came nearest is asked for where nothing is found: then nothing is passed over.
                apt = self.thorough or self.reading.may_be(term, unifier.needs(first))
                if term in seen or not apt:
                    continue
                one = self._at(alternative, unifier, first, term, None if partly else seen)
                if one is not None:
                    seen.update(root.term for root in one.roots)
                    yield one
        self._missed(alternative.pattern, unifier)

    def unifier(self, alternative: Alternative, skeleton: Skeleton | None = None) -> Unifier:
        """What proposes places for a pattern, by its skeleton or another one."""
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
        """By the first binding that gives all outputs, or the one that gives most.

        Args:
            seen: the outputs of other occurrences, which are none of this one's; None if it may have
                some outputs only, and parts of sums for outputs.
        """
        partly, taken = seen is None, {term, *(seen or ())}
        best, tries, places = None, _COMBINATIONS, itertools.count()
        for binding in itertools.islice(unifier.at(first, term), _COMBINATIONS):
            for bound in self._completed(unifier, first, taken, binding, places):
                one = self.verifier.verified(alternative, first, term, bound, partly)
                if one is not None and (best is None or len(one.roots) > len(best.roots)):
                    best, tries = one, min(tries, _BETTER)
                tries -= 1
                if best is not None and (
                    not tries or len(best.roots) == len(unifier.skeleton.roots)
                ):
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
        """With the inputs that only other outputs read, from where those may be."""
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
            self.misses[pattern] = Miss(pattern, 0, None, "none of its operations is there")
            return
        p, t = unifier.reached
        nodes = self.reading.nodes.get(t)
        self.misses[pattern] = Miss(
            pattern,
            unifier.best,
            nodes[0] if nodes else None,
            f"{spoken(t)} where the pattern has {spoken(p)}"
            if t.op != p.op
            else f"{spoken(t)} fits, but dims, numbers or what it is applied to differ",
        )


def _by_inputs(skeleton: Skeleton) -> list[tuple[int, int]]:
    """Outputs and how many inputs they depend on, those that depend on most first."""
    counts = [(j, len(skeleton.reads(root))) for j, root in enumerate(skeleton.roots)]
    return sorted(counts, key=lambda item: -item[1])
