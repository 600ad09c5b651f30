"""Skeleton: what a pattern is at shapes of no importance, which says where to look for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchard.kernels.course import is_firm
from torchard.kernels.reading import inside
from torchard.kernels.terms import Term

__all__ = ["Skeleton"]


@dataclass(frozen=True)
class Skeleton:
    """A pattern's terms at shapes of no importance.

    Attributes:
        roots: one per output, in order.
        inputs: the tensor inputs' terms.
        markers: for each number that stands for a literal, its name.
    """

    roots: tuple[Term, ...]
    inputs: tuple[Term, ...]
    markers: dict[float, str]
    sizes: dict[Term, int] = field(default_factory=dict)
    read: dict[Term, frozenset[int]] = field(default_factory=dict)

    @cached_property
    def terms(self) -> frozenset[Term]:
        """All that is computed, inputs among it."""
        return inside(self.roots)

    @cached_property
    def turned(self) -> frozenset[int]:
        """The numbers of the inputs that are the matrix of a product, the dim that is summed first."""
        found = set()
        for term in self.terms:
            for operand, access in term.operands if term.op == "dot" else ():
                kept = max((stride for _, stride in access.dims[: len(term.sizes)]), default=0)
                summed = max((stride for _, stride in access.dims[len(term.sizes) :]), default=0)
                if operand in self.inputs and summed > kept:
                    found.add(self.inputs.index(operand))
        return frozenset(found)

    @cached_property
    def operations(self) -> frozenset[Any]:
        """Those that it has wherever it is, whatever becomes of sums and products."""
        ops = (term.op for term in self.terms if is_firm(term))
        return frozenset(op for op in ops if getattr(op, "namespace", "") != "torchard_pattern")

    def reads(self, term: Term) -> frozenset[int]:
        """The numbers of the inputs that a term depends on."""
        if term not in self.read:
            found = {self.inputs.index(term)} if term in self.inputs else set()
            self.read[term] = frozenset(found.union(*(self.reads(o) for o, _ in term.operands)))
        return self.read[term]

    def size(self, term: Term) -> int:
        """How many operations there are in a term, what is shared counted as often as it is read."""
        if term not in self.sizes:
            self.sizes[term] = 1 + sum(self.size(operand) for operand, _ in term.operands)
        return self.sizes[term]
