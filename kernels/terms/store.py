"""The store of terms: operations on values, whose results are terms in normal form.

Sums and products are multisets with coefficients and exponents; scalar factors are pulled out of
products, reductions and contractions; a sum of sums is one sum. These identities hold for real numbers:
spellings that differ in rounding only are the same term. Casts remain, because they round on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from torchard.functional.core.tensor_spec import holds
from torchard.kernels.terms.access import Access, contiguous
from torchard.kernels.terms.loop_nest import Canonical, Nest, NotStrided
from torchard.kernels.terms.terms import (
    Number,
    Operand,
    Term,
    TermValue,
    held,
    is_multiple,
    literal,
    number,
    through,
    unscaled,
)

__all__ = ["Store"]

# Reductions whose results do not change if elements are repeated.
_IDEMPOTENT = ("amax", "amin", "any", "all")


class Store:
    """The store of interned terms.

    Attributes:
        shared: sums that several operations read. They are kept as separate terms, not inlined into the
            sums that read them.
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
        known = self._terms.get(key)
        if known is None:
            known = Term(
                len(self._terms), op, dtype, tuple(sizes), tuple(reduced), tuple(operands), numbers
            )
            self._terms[key] = known
        return known

    # -- leaves -------------------------------------------------------------------------------

    def leaf(self, label: Hashable, shape: Sequence[int], dtype: torch.dtype) -> TermValue:
        """A value about which nothing is known."""
        shape = tuple(shape)
        return TermValue(self.term("input", dtype, shape, numbers=(label,)), contiguous(shape))

    def constant(self, value: Number, shape: Sequence[int], dtype: torch.dtype) -> TermValue:
        """A value whose elements are all the same number, as the dtype holds it."""
        term = self.term("constant", dtype, (), numbers=(number(held(value, dtype), dtype),))
        return TermValue(term, Access(()).expanded(tuple(shape)))

    def opaque(
        self,
        op: Any,
        values: Sequence[TermValue],
        literals: Hashable,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> TermValue:
        """The value of an opaque operation: equal only to the operation's value on equal operands."""
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
        except NotStrided:  # an operand that is a sum cannot be inlined
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
            # A multiple of one value is inlined, as the value with a factor, even if it is shared.
            separate = term.op != "sum" or (term in self.shared and not is_multiple(term))
            if flat and not separate:
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
            product = self._product(kept, shape, dtype, True)
        except NotStrided:
            product = self._product(kept, shape, dtype, False)
        return self.scale(product, factor)

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
            if source.dtype == dtype and holds(value.dtype, dtype):
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
        removed = sorted({d % rank for d in dims}) if rank else []
        kept = [d for d in range(rank) if d not in removed]
        factor, inner = unscaled(value) if name == "sum" else (1.0, value)
        turned = inner.access.permuted([*kept, *removed])
        form = self._reduced(name, TermValue(inner.term, turned), len(kept))
        # Repeated elements change nothing, or become a factor (of a sum), or are recorded in the term.
        merged = name in _IDEMPOTENT or name == "sum"
        numbers = () if merged else (form.repeats,)
        op = ("reduce", name) if form.reduced or not merged else "copy"
        term = self.term(op, dtype, form.sizes, form.operands, numbers, form.reduced)
        if op == "copy":
            term = _itself(term)
        result = TermValue(term, form.result)
        if name == "sum":
            result = self.scale(result, factor * form.repeats)
        access = result.access
        for d in removed if keepdim else ():
            access = access.unsqueezed(d)
        return TermValue(result.term, access)

    def _reduced(self, name: str, value: TermValue, kept: int) -> Canonical:
        """The nest of a reduction, merged with the value's nest if that is a reduction of this kind."""
        nest = Nest(value.shape, [(value.term, value.access)], kept)
        term = value.term
        if term.op == ("reduce", name) and (name == "sum" or name in _IDEMPOTENT):
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


def _alone(
    parts: Sequence[tuple[float, TermValue]], shape: Sequence[int], dtype: torch.dtype
) -> TermValue | None:
    """The value of a sum or product with one operand, taken once; None for other sums and products."""
    (number, value), *more = parts
    if more or number != 1 or value.dtype != dtype:
        return None
    return TermValue(value.term, value.access.expanded(shape))


def _itself(term: Term) -> Term:
    """The term that ``term`` copies, if it is a copy of a whole buffer; else ``term``."""
    ((source, access),) = term.operands
    return source if _in_order(source, access) and source.dtype == term.dtype else term


def _in_order(term: Term, access: Access) -> bool:
    """Whether an access reads all of a term's buffer in order."""
    return access.reshaped(term.sizes) == contiguous(term.sizes)


def _power(base: Number, exponent: float) -> float:
    """A power of a number: infinite for a negative power of 0, NaN for complex results."""
    try:
        power = base**exponent
    except ZeroDivisionError:
        return math.inf
    return power if isinstance(power, (int, float)) else math.nan


def _distributes(exponents: Sequence[float], outer: float) -> bool:
    """Whether a power of a product equals the product of its factors' powers, whatever the signs."""
    return outer == int(outer) or (len(exponents) == 1 and exponents[0] % 2 != 0)


def _place(operand: Operand) -> tuple[Any, ...]:
    term, access = operand
    return term.id, access.offset, access.dims


def _merged(
    form: Canonical, numbers: Sequence[float], apart: bool = False
) -> tuple[Canonical, list[float]]:
    """Merge equal operands and sort them; if ``apart``, numbers of opposite signs are not merged."""
    total: dict[Any, list[Any]] = {}
    for operand, n in zip(form.operands, numbers, strict=True):
        key = (*_place(operand), n < 0 if apart else None)
        total.setdefault(key, [operand, 0])[1] += n
    rows = [(key, row) for key, row in total.items() if row[1] != 0]
    rows.sort(key=lambda item: (item[0][:3], item[1][1]))
    operands = tuple(row[0] for _, row in rows)
    merged = Canonical(form.sizes, form.reduced, operands, form.result, form.repeats)
    return merged, [row[1] for _, row in rows]
