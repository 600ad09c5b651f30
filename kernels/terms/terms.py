"""Terms: values in normal form, interned. Equal terms are equal functions of their inputs.

A term is an operation over a loop nest that reads other terms through strides. Sums and products are
multisets with coefficients and exponents; scalar factors are pulled out of products, reductions and
contractions; a sum of sums is one sum. This is algebra over the reals: spellings that differ in rounding
only are the same term. Casts are kept, since they are deliberate rounding.

Terms are for matching only. The program they were read from keeps its operations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.kernels.terms.access import Access, contiguous
from torchard.kernels.terms.loop_nest import Canonical, Nest, NotStrided

__all__ = [
    "Number",
    "Operand",
    "Store",
    "Term",
    "TermValue",
    "is_multiple",
    "literal",
    "number",
    "through",
    "unscaled",
]

Number = float | int | bool

# Idempotent reductions.
_ONCE = ("amax", "amin", "any", "all")


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One value, a contiguous buffer.

    Attributes:
        op: ``input``, ``constant``, ``sum``, ``product``, ``dot``, ``cast``, ``("reduce", name)``,
            or the operation itself.
        sizes, reduced: the sizes of the buffer, and of the reduced loops inside.
        operands: terms and their accesses, over the loops, or in their own dims (for opaque terms).
        numbers: the coefficients of a sum, then its constant; the exponents of a product; literals.
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
    """A number rounded for comparison, since numbers computed in two ways differ in the last digits."""
    if isinstance(value, bool) or not isinstance(value, float) or not math.isfinite(value):
        return value
    rounded = float(f"{value:.12e}" if dtype == torch.float64 else f"{value:.6e}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


class Store:
    """The store of interned terms.

    Attributes:
        shared: sums with several readers, which sums that read them do not inline.
        casts: whether any value is cast.
    """

    def __init__(self) -> None:
        self.casts = False
        self._terms: dict[Hashable, Term] = {}
        self.shared: set[Term] = set()

    @property
    def operations(self) -> set[Any]:
        """The operations of all terms."""
        return {term.op for term in self._terms.values()}

    def __len__(self) -> int:
        """The number of terms, which is the id of the next one."""
        return len(self._terms)

    def term(
        self,
        op: Any,
        dtype: torch.dtype,
        sizes: Sequence[int],
        operands: Sequence[Operand] = (),
        numbers: Iterable[Any] = (),
        reduced: Sequence[int] = (),
    ) -> Term:
        """The interned term with these attributes."""
        numbers = tuple(numbers)
        reads = tuple((term.id, access) for term, access in operands)
        key = (op, dtype, tuple(sizes), tuple(reduced), reads, numbers)
        found = self._terms.get(key)
        if found is None:
            found = Term(
                len(self._terms), op, dtype, tuple(sizes), tuple(reduced), tuple(operands), numbers
            )
            self._terms[key] = found
        return found

    # -- leaves -------------------------------------------------------------------------------

    def leaf(self, label: Hashable, shape: Sequence[int], dtype: torch.dtype) -> TermValue:
        """A value of which nothing is known."""
        shape = tuple(shape)
        return TermValue(self.term("input", dtype, shape, numbers=(label,)), contiguous(shape))

    def constant(self, value: Number, shape: Sequence[int], dtype: torch.dtype) -> TermValue:
        """A value that is one number everywhere."""
        term = self.term("constant", dtype, (), numbers=(number(value, dtype),))
        return TermValue(term, Access(()).expanded(tuple(shape)))

    def opaque(
        self,
        op: Any,
        values: Sequence[TermValue],
        literals: Hashable,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> TermValue:
        """The value of an operation of which only equality is known."""
        operands = [(v.term, v.access) for v in values]
        return TermValue(self.term(op, dtype, shape, operands, (literals,)), contiguous(shape))

    # -- arithmetic ---------------------------------------------------------------------------

    def add(
        self,
        parts: Sequence[tuple[float, TermValue | Number]],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> TermValue:
        """A sum of multiples of values, broadcast to a shape."""
        constant: float = 0
        kept: list[tuple[float, TermValue]] = []
        for factor, part in parts:
            known = literal(part)
            if known is not None:
                constant += factor * known
            else:
                assert isinstance(part, TermValue)
                kept.append((factor, part))
        if not kept:
            return self.constant(constant, shape, dtype)
        alone = _alone(kept, shape, dtype) if constant == 0 else None
        if alone is not None:
            return alone
        try:
            return self._sum(kept, constant, shape, dtype, True)
        except NotStrided:  # a part whose dims are crossed is not inlined
            return self._sum(kept, constant, shape, dtype, False)

    def _sum(
        self,
        parts: Sequence[tuple[float, TermValue]],
        constant: float,
        shape: Sequence[int],
        dtype: torch.dtype,
        flat: bool,
    ) -> TermValue:
        nest = Nest(shape, [(v.term, v.access.expanded(shape)) for _, v in parts])
        factors = [factor for factor, _ in parts]
        k = 0
        while k < len(factors):
            term = nest.operands[k][0]
            # A multiple of one value is inlined as that value with a factor, even if it is shared.
            whole = term.op != "sum" or (term in self.shared and not is_multiple(term))
            if flat and not whole:
                *inner, more = term.numbers
                nest.inline(k, term.operands, term.sizes)
                factor = factors.pop(k)
                factors += [factor * f for f in inner]
                constant += factor * more
            else:
                k += 1
        form, factors = _merged(nest.canonical(), factors)
        if not form.operands:
            return self.constant(constant, shape, dtype)
        if len(factors) == 1 and factors[0] == 1 and constant == 0:
            ((term, access),) = form.operands
            if _in_order(term, access) and term.dtype == dtype:
                return TermValue(term, form.result)
        numbers = [number(n, dtype) for n in (*factors, constant)]
        return TermValue(self.term("sum", dtype, form.sizes, form.operands, numbers), form.result)

    def scale(self, value: TermValue, factor: float) -> TermValue:
        """A multiple of a value."""
        return value if factor == 1 else self.add([(factor, value)], value.shape, value.dtype)

    def multiply(
        self,
        parts: Sequence[tuple[float, TermValue | Number]],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> TermValue:
        """A product of powers of values, broadcast to a shape."""
        factor: float = 1
        kept: list[tuple[float, TermValue]] = []
        for exponent, part in parts:
            known = literal(part)
            if known is not None:
                factor *= _power(known, exponent)
                continue
            assert isinstance(part, TermValue)
            outer, inner = unscaled(part)
            if outer != 1 and not (outer < 0 and exponent != int(exponent)):
                factor *= _power(outer, exponent)
                part = inner
            kept.append((exponent, part))
        if not kept:
            return self.constant(factor, shape, dtype)
        alone = _alone(kept, shape, dtype)
        if alone is not None:
            return self.scale(alone, factor)
        try:
            found = self._product(kept, shape, dtype, True)
        except NotStrided:
            found = self._product(kept, shape, dtype, False)
        return self.scale(found, factor)

    def _product(
        self,
        parts: Sequence[tuple[float, TermValue]],
        shape: Sequence[int],
        dtype: torch.dtype,
        flat: bool,
    ) -> TermValue:
        nest = Nest(shape, [(v.term, v.access.expanded(shape)) for _, v in parts])
        exponents = [exponent for exponent, _ in parts]
        k = 0
        while k < len(exponents):
            term = nest.operands[k][0]
            if term.op == "product" and flat and _distributes(term.numbers, exponents[k]):
                nest.inline(k, term.operands, term.sizes)
                exponent = exponents.pop(k)
                exponents += [exponent * e for e in term.numbers]
            else:
                k += 1
        form, exponents = _merged(nest.canonical(), exponents, apart=True)
        if exponents == [1]:
            ((term, access),) = form.operands
            if _in_order(term, access) and term.dtype == dtype:
                return TermValue(term, form.result)
        numbers = [number(n, dtype) for n in exponents]
        return TermValue(self.term("product", dtype, form.sizes, form.operands, numbers), form.result)

    # -- other operations over loops ----------------------------------------------------------

    def pointwise(
        self,
        op: Any,
        values: Sequence[TermValue],
        literals: Hashable,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> TermValue:
        """The value of a pointwise operation."""
        form = Nest(shape, [(v.term, v.access.expanded(shape)) for v in values]).canonical()
        return TermValue(self.term(op, dtype, form.sizes, form.operands, (literals,)), form.result)

    def cast(self, value: TermValue, dtype: torch.dtype) -> TermValue:
        """A value cast to another dtype; a cast to a wider dtype and back is the value itself."""
        if value.dtype == dtype:
            return value
        known = literal(value)
        if known is not None:
            return self.constant(known, value.shape, dtype)
        if value.term.op == "cast":
            ((source, _),) = value.term.operands
            if source.dtype == dtype and _holds(value.dtype, dtype):
                inner = through(value)
                if inner is not None:
                    return inner
        self.casts = True
        return self.pointwise("cast", [value], None, value.shape, dtype)

    def reduce(
        self, name: str, value: TermValue, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
    ) -> TermValue:
        """A reduction over dims: ``sum``, ``amax``, ``amin``, or another name."""
        rank = len(value.shape)
        gone = sorted({d % rank for d in dims}) if rank else []
        kept = [d for d in range(rank) if d not in gone]
        factor, inner = unscaled(value) if name == "sum" else (1.0, value)
        turned = inner.access.permuted([*kept, *gone])
        form = self._reduced(name, TermValue(inner.term, turned), len(kept))
        once = name in _ONCE or name == "sum"
        numbers = () if once else (form.repeats,)
        op = ("reduce", name) if form.reduced or not once else "copy"
        term = self.term(op, dtype, form.sizes, form.operands, numbers, form.reduced)
        if op == "copy":
            term = _itself(term)
        found = TermValue(term, form.result)
        if name == "sum":
            found = self.scale(found, factor * form.repeats)
        access = found.access
        for d in gone if keepdim else ():
            access = access.unsqueezed(d)
        return TermValue(found.term, access)

    def _reduced(self, name: str, value: TermValue, kept: int) -> Canonical:
        """The nest of a reduction; a reduction of one of the same name is merged with it."""
        nest = Nest(value.shape, [(value.term, value.access)], kept)
        term = value.term
        if term.op == ("reduce", name) and (name == "sum" or name in _ONCE):
            try:
                nest.inline(0, term.operands, term.sizes, term.reduced)
                return nest.canonical()
            except NotStrided:
                nest = Nest(value.shape, [(value.term, value.access)], kept)
        return nest.canonical()

    def dot(self, a: TermValue, b: TermValue, dtype: torch.dtype) -> TermValue:
        """The product of [..., m, k] and [..., k, n] with equal batch dims."""
        (fa, a), (fb, b) = unscaled(a), unscaled(b)
        *batch, m, k = a.shape
        n = b.shape[-1]
        loops = [*batch, m, n, k]
        rows = a.access.unsqueezed(len(batch) + 1).expanded(loops)
        turned = b.access.permuted([*range(len(batch)), len(batch) + 1, len(batch)])
        columns = turned.unsqueezed(len(batch)).expanded(loops)
        form = Nest(loops, [(a.term, rows), (b.term, columns)], len(batch) + 2).canonical()
        operands = sorted(form.operands, key=_place)
        term = self.term("dot", dtype, form.sizes, operands, (form.repeats,), form.reduced)
        return self.scale(TermValue(term, form.result), fa * fb)

    def copy(self, value: TermValue, shape: Sequence[int]) -> TermValue:
        """A copy of a value in a shape that its strides do not allow."""
        copied = self.opaque("copy", [value], (), value.shape, value.dtype)
        access = copied.access.reshaped(shape)
        assert access is not None
        return TermValue(copied.term, access)


def literal(part: TermValue | Number) -> Number | None:
    """The number that a part is, if it is a number or a constant value; else None."""
    if not isinstance(part, TermValue):
        return part
    return part.term.numbers[0] if part.term.op == "constant" else None


def is_multiple(term: Term) -> bool:
    return term.op == "sum" and len(term.operands) == 1 and term.numbers[1] == 0


def unscaled(value: TermValue) -> tuple[float, TermValue]:
    """A factor and the value of which a value is that multiple."""
    inner = through(value) if is_multiple(value.term) else None
    return (1, value) if inner is None else (value.term.numbers[0], inner)


def through(value: TermValue, k: int = 0, *, within: bool = False) -> TermValue | None:
    """The k-th operand of a term over loops, in the dims of a value that reads the term.

    Args:
        within: also look inside reductions, with the dims that they reduce as further dims.

    Returns:
        The operand's value; None if no strides give it.
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
        found = at.reshaped([size]) if pieces else Access(((size, 0),))
        if found is None:
            return None
        dims += found.dims
    dims += access.dims[len(term.sizes) :]
    return TermValue(source, Access(tuple(dims), nest.operands[0][1]))


def _alone(
    parts: Sequence[tuple[float, TermValue]], shape: Sequence[int], dtype: torch.dtype
) -> TermValue | None:
    """The value that a sum or product with one operand, once, is equal to."""
    (number, value), *more = parts
    if more or number != 1 or value.dtype != dtype:
        return None
    return TermValue(value.term, value.access.expanded(shape))


def _itself(term: Term) -> Term:
    """The term that a term copies, if it is the copy of a whole buffer; else the term."""
    ((source, access),) = term.operands
    return source if _in_order(source, access) and source.dtype == term.dtype else term


def _in_order(term: Term, access: Access) -> bool:
    """Whether an access reads all of a term's buffer in order."""
    return access.reshaped(term.sizes) == contiguous(term.sizes)


def _power(base: Number, exponent: float) -> float:
    try:
        found = base**exponent
    except ZeroDivisionError:
        return math.inf
    return found if isinstance(found, (int, float)) else math.nan


def _distributes(exponents: Sequence[float], outer: float) -> bool:
    """Whether a power of a product of powers is the product of their powers, for every sign."""
    return outer == int(outer) or (len(exponents) == 1 and exponents[0] % 2 != 0)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a dtype represents every number of a narrower one."""
    return (
        wide.is_floating_point
        and narrow.is_floating_point
        and torch.promote_types(wide, narrow) == wide
    )


def _place(operand: Operand) -> tuple[Any, ...]:
    term, access = operand
    return term.id, access.offset, access.dims


def _merged(
    form: Canonical, numbers: Sequence[float], apart: bool = False
) -> tuple[Canonical, list[float]]:
    """Merge equal operands, in canonical order; ``apart`` keeps operands of two signs separate."""
    total: dict[Any, list[Any]] = {}
    for operand, n in zip(form.operands, numbers, strict=True):
        key = (*_place(operand), n < 0 if apart else None)
        total.setdefault(key, [operand, 0])[1] += n
    rows = [(key, row) for key, row in total.items() if row[1] != 0]
    rows.sort(key=lambda item: (item[0][:3], item[1][1]))
    operands = tuple(row[0] for _, row in rows)
    merged = Canonical(form.sizes, form.reduced, operands, form.result, form.repeats)
    return merged, [row[1] for _, row in rows]
