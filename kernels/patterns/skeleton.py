"""Skeletons: the terms of a pattern at arbitrary shapes, which suggest where to look for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchard.kernels.patterns.match_plan import is_firm
from torchard.kernels.terms.access import Access
from torchard.kernels.terms.reading import bare, inside
from torchard.kernels.terms.terms import Term

__all__ = ["Skeleton", "same_form"]


@dataclass(frozen=True)
class Skeleton:
    """A pattern's terms at arbitrary shapes.

    Attributes:
        roots, accesses: the term and the access of each output, in order.
        inputs: the terms of the tensor inputs.
        markers: the name of the literal that each marker number represents.
    """

    roots: tuple[Term, ...]
    accesses: tuple[Access, ...]
    inputs: tuple[Term, ...]
    markers: dict[float, str]
    sizes: dict[Term, int] = field(default_factory=dict)
    read: dict[Term, frozenset[int]] = field(default_factory=dict)

    @cached_property
    def terms(self) -> frozenset[Term]:
        """All terms, including the inputs."""
        return inside(self.roots)

    @cached_property
    def turned(self) -> frozenset[int]:
        """The numbers of inputs that are matrices of products with the contracted dim first."""
        numbers = set()
        for term in self.terms:
            for operand, access in term.operands if term.op == "dot" else ():
                kept = max((stride for _, stride in access.dims[: len(term.sizes)]), default=0)
                summed = max((stride for _, stride in access.dims[len(term.sizes) :]), default=0)
                if operand in self.inputs and summed > kept:
                    numbers.add(self.inputs.index(operand))
        return frozenset(numbers)

    @cached_property
    def operations(self) -> frozenset[Any]:
        """The operations of every occurrence, whatever sums and products are merged into."""
        ops = (term.op for term in self.terms if is_firm(term))
        return frozenset(op for op in ops if getattr(op, "namespace", "") != "torchard_pattern")

    @cached_property
    def widest(self) -> int:
        """The output that depends on most inputs."""
        return max(range(len(self.roots)), key=lambda j: len(self.reads(self.roots[j])))

    def reads(self, term: Term) -> frozenset[int]:
        """The numbers of the inputs that a term depends on."""
        if term not in self.read:
            own = {self.inputs.index(term)} if term in self.inputs else set()
            self.read[term] = frozenset(own.union(*(self.reads(o) for o, _ in term.operands)))
        return self.read[term]

    def size(self, term: Term) -> int:
        """The number of operations in a term; shared terms count once per reader."""
        if term not in self.sizes:
            self.sizes[term] = 1 + sum(self.size(operand) for operand, _ in term.operands)
        return self.sizes[term]


def same_form(one: Skeleton, other: Skeleton, *, rounding: bool = False) -> bool:
    """Whether two skeletons have the same operations on the same inputs, factors aside.

    Args:
        rounding: also compare where values are rounded; otherwise casts are ignored.
    """
    known: dict[Any, int] = {}
    return _forms(one.roots, known, rounding) == _forms(other.roots, known, rounding)


def _forms(terms: Sequence[Term], known: dict[Any, int], rounding: bool) -> list[int]:
    """A number for each term, equal where their forms are."""
    forms = []
    for term in terms if rounding else map(bare, terms):
        if term not in known:
            inner = _forms([operand for operand, _ in term.operands], known, rounding)
            number = term.numbers if term.op == "input" else ()
            key = term.op, tuple(inner), number, term.dtype if rounding else None
            known[term] = known.setdefault(key, len(known))
        forms.append(known[term])
    return forms
