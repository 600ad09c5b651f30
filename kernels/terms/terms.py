"""Terms: the values of programs, as operations over loop nests that read other terms through strides.

A store (`store.py`) interns terms in normal form: equal terms are equal functions of their inputs. Terms
are for matching only; the program from which they were read keeps its operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from torchard.kernels.terms.access import Access
from torchard.kernels.terms.loop_nest import Nest, NotStrided

__all__ = [
    "Number",
    "Operand",
    "Term",
    "TermValue",
    "held",
    "is_multiple",
    "is_power",
    "literal",
    "number",
    "through",
    "unscaled",
]

Number = float | int | bool


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A value in a contiguous buffer.

    Attributes:
        op: ``input``, ``constant``, ``sum``, ``product``, ``dot``, ``cast``, ``("reduce", name)``,
            or the operation itself.
        sizes, reduced: the sizes of the buffer, and the sizes of the reduced loops inside.
        operands: the terms that it reads, each with an access over the loops; for opaque terms, an access
            in the operand's own dims.
        numbers: the coefficients of a sum, then its constant; the exponents of a product; otherwise the
            literals of the operation.
    """

    id: int
    op: Any
    dtype: torch.dtype
    sizes: tuple[int, ...]
    reduced: tuple[int, ...]
    operands: tuple[Operand, ...]
    numbers: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"t{self.id}"

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.op if isinstance(self.op, str) else str(self.op)


Operand = tuple[Term, Access]


@dataclass(frozen=True, slots=True)
class TermValue:
    """A term and the access by which a tensor reads it."""

    term: Term
    access: Access

    @property
    def shape(self) -> tuple[int, ...]:
        return self.access.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.term.dtype

    def is_reshape_of(self, other: TermValue) -> bool:
        """Whether both have the same elements in the same order."""
        return self.term is other.term and (
            self == other or self.access.reshaped(other.shape) == other.access
        )


def number(value: Number, dtype: torch.dtype = torch.float32) -> Number:
    """A number rounded for comparison, because two ways to compute it differ in the last digits."""
    if isinstance(value, bool) or not isinstance(value, float) or not math.isfinite(value):
        return value
    rounded = float(f"{value:.12e}" if dtype == torch.float64 else f"{value:.6e}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def held(value: Number, dtype: torch.dtype) -> Number:
    """A number as a bool or an integer dtype holds it; in all other dtypes it is the number itself."""
    if dtype.is_floating_point or dtype.is_complex or not math.isfinite(value):
        return value
    if dtype == torch.bool:
        return bool(value)
    limits = torch.iinfo(dtype)
    return (int(value) - limits.min) % (limits.max - limits.min + 1) + limits.min


def literal(part: TermValue | Number) -> Number | None:
    """The number of an operand that is a number or a constant; None for other operands."""
    if not isinstance(part, TermValue):
        return part
    return part.term.numbers[0] if part.term.op == "constant" else None


def is_multiple(term: Term) -> bool:
    """Whether a term is a multiple of another: a sum of one operand, without a constant."""
    return term.op == "sum" and len(term.operands) == 1 and term.numbers[1] == 0


def is_power(term: Term) -> bool:
    """Whether a term is a power of another: a product of one operand."""
    return term.op == "product" and len(term.operands) == 1


def unscaled(value: TermValue) -> tuple[float, TermValue]:
    """A factor and a value whose product is ``value``; 1 and ``value`` if it is not a multiple."""
    inner = through(value) if is_multiple(value.term) else None
    return (1, value) if inner is None else (value.term.numbers[0], inner)


def through(value: TermValue, k: int = 0, *, within: bool = False) -> TermValue | None:
    """The k-th operand of a term over loops, in the dims of a value that reads the term.

    Args:
        within: also read operands of reductions; the dims that they reduce are further dims.

    Returns:
        The operand's value; None if no strides read it.
    """
    term = value.term
    source, access = term.operands[k]
    if (term.reduced and not within) or len(access.dims) != len(term.sizes) + len(term.reduced):
        return None
    nest = Nest(value.shape, [(term, value.access)])
    try:
        nest.inline(0, [(source, access)], term.sizes, term.reduced)
    except NotStrided:
        return None
    dims: list[tuple[int, int]] = []
    for size, pieces in zip(value.shape, nest.dims, strict=True):
        at = Access(tuple((n, loop.strides[0] * m) for loop, m, n in pieces))
        joined = at.reshaped([size]) if pieces else Access(((size, 0),))
        if joined is None:
            return None
        dims += joined.dims
    dims += access.dims[len(term.sizes) :]
    return TermValue(source, Access(tuple(dims), nest.operands[0][1]))
