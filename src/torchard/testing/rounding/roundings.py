"""Which operations of a program round, and by how much: the model of rounding errors.

The model is of backward errors: an operation returns the exact result for perturbed operands, rounded
once more. The perturbations represent the rounding errors inside the operation. The errors in a sum of k
terms are assumed to be independent, so that they grow as the square root of k (Higham, Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019). The
size of a rounding error follows from the dtype.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.costs.flops import flops, is_product
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.accessors import pytree
from torchard.testing.rounding.movement import counts, literals, moves

__all__ = [
    "Rounding",
    "alike",
    "narrower",
    "rounded",
    "rounded_number",
    "roundings_of",
    "unit_roundoff",
]

def alike(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that are equal in both tensors; NaNs are equal."""
    return (x == y) | ((x != x) & (y != y))


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floating numbers rounded to this dtype, in double precision.

    Overflow and underflow do not count as rounding: no number becomes infinite or zero.
    """
    if x.is_complex():
        return torch.view_as_complex(rounded(torch.view_as_real(x.resolve_conj()), dtype))
    wide = x.double()
    near = x.to(dtype).double()
    near = torch.where((near == 0) & (wide != 0), wide * (1 + unit_roundoff(dtype)), near)
    return torch.where(near.isfinite(), near, wide)


def rounded_number(x: float, dtype: torch.dtype) -> float:
    """A number rounded to this dtype; see `rounded`."""
    return float(rounded(torch.tensor(x, dtype=torch.float64), dtype))


def narrower(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """The floating dtype with the larger unit roundoff; ``dtype`` if there is no other."""
    return _real(dtype) if other is None else max(_real(dtype), other, key=unit_roundoff)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


@dataclass(frozen=True)
class Rounding:
    """Relative errors (standard deviations) of one operation.

    Attributes:
        inside: the errors of its operands, which represent rounding errors inside the operation.
        of_result: the errors of its result.
        literals: the dtype to which the floating numbers among its arguments are rounded, if they are
            elements of its result. Their rounding is known, not random.
    """

    inside: float = 0.0
    of_result: float = 0.0
    literals: torch.dtype | None = None


def roundings_of(
    program: Program,
    values: Mapping[fx.Node, Any],
    counted: Callable[[torch.dtype], torch.dtype],
    inexact: Collection[fx.Node] = (),
) -> dict[fx.Node, Rounding]:
    """The operations of a program that round.

    Views, operations that move values, and items of tuples do not round. Nor do operations on integers or
    booleans, or on small integers or multiples of one power of two in floating tensors, as long as
    results and intermediate sums are such numbers too.

    Args:
        program: a program over global values.
        values: the value of every node, in double precision.
        counted: maps an operation's real dtype to the one in which the operation counts as computed; for
            a program that represents one in other dtypes.
        inexact: inputs that are rounded before operations read them.
    """
    exact = set(program.placeholders) - set(inexact)
    found: dict[fx.Node, Rounding] = {}
    for node in program.calls:
        floats = filter(is_inexact, _tensors(VAL.of(node)))
        dtypes = [counted(v.dtype) for v in floats]
        units = list(map(unit_roundoff, dtypes))
        computes = bool(units) and not moves(node) and node.target is not operator.getitem
        of_exact = all(source in exact for source in node.all_input_nodes)
        if counts(node) or not units:  # rounding its operands moves it by one, or not at all
            exact.add(node)
        elif computes:
            if of_exact and _is_exact(node, values, min(map(_bits, units))):
                exact.add(node)
            else:
                found[node] = _rounding(node, max(units))
        elif units and any(_is_rounded(x, dtypes[0]) for x in literals(node)):
            found[node] = Rounding(literals=dtypes[0])
        elif of_exact:
            exact.add(node)
    return found


def _is_rounded(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and rounded_number(x, dtype) != x


def _rounding(node: fx.Node, unit: float) -> Rounding:
    """The errors of an operation whose result has this unit roundoff.

    The standard deviation of one rounding is the unit roundoff divided by sqrt(3). Functions such as exp
    have the error of two roundings in their own dtype. 16-bit operations compute in float32 and round
    once; sums over ranks also round the sum of each rank.
    """
    single = unit / math.sqrt(3)
    held = min(unit, unit_roundoff(torch.float32)) / math.sqrt(3)
    terms = _terms(node)
    inside = 2 * held * math.sqrt(terms) + (single if held < single and terms > 1 else 0.0)
    return Rounding(inside, max(single, 2 * held))


def _terms(node: fx.Node) -> float:
    """The number of terms that are added for one element of the result: a rough upper bound."""
    results = [v for v in pytree.tree_leaves(VAL.of(node)) if isinstance(v, torch.Tensor)]
    count = max(1, sum(v.numel() for v in results))
    if is_product(node):
        return max(1.0, flops(node) / (2 * count))
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return 1.0
    operands = [VAL.of(n) for n in node.all_input_nodes]
    sizes = [v for v in pytree.tree_leaves(operands) if isinstance(v, torch.Tensor)]
    longest = max((max(v.shape, default=1) for v in sizes), default=1)
    return max(1.0, longest, sum(v.numel() for v in sizes) / count)


# -- the number of bits that values need --------------------------------------------------------------


def _is_exact(node: fx.Node, values: Mapping[fx.Node, Any], bits: int) -> bool:
    """Whether neither the result nor any intermediate sum needs more than ``bits`` bits."""
    operands = [_span(x) for n in node.all_input_nodes for x in _tensors(values[n])]
    results = [x for x in _tensors(values[node]) if is_inexact(x)]
    if any(_bits_of_each(x) > min(bits, _CHANCE) for x in results):
        return False
    terms = math.log2(2 * _terms(node))
    return terms + sum(max(span.high, 0) - min(span.low, 0) for span in operands) <= bits


# A double has 53 bits. A rounded result fits in fewer than this number by chance, once in thousands.
_CHANCE = 40


def _bits(unit: float) -> int:
    """The number of bits in a significand, including the leading 1."""
    return -round(math.log2(unit))


@dataclass(frozen=True)
class _Span:
    """All numbers are multiples of 2**low, and below 2**high in magnitude."""

    low: float
    high: float


def _span(x: torch.Tensor) -> _Span:
    x = _reals(x)
    if not bool(x.isfinite().all()):
        return _Span(-math.inf, math.inf)
    x = x[x != 0]
    if not x.numel():
        return _Span(0, 0)
    return _Span(int(_lowest_bit(x).min()), int(torch.frexp(x).exponent.max()))


def _bits_of_each(x: torch.Tensor) -> float:
    """The largest number of significant bits that any number needs."""
    x = _reals(x)
    x = x[x != 0]
    if not bool(x.isfinite().all()):
        return math.inf
    return int((torch.frexp(x).exponent - _lowest_bit(x)).max()) if x.numel() else 0


def _lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """The exponent of the lowest set bit of each number; no number is zero."""
    fraction, exponent = torch.frexp(x)
    whole = (fraction * 2.0**53).long()
    lowest = torch.frexp((whole & -whole).double()).exponent - 1
    return exponent - 53 + lowest


def _reals(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
