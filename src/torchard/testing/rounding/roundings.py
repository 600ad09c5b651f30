"""Which operations of a program round, and by how much: the model of rounding errors.

Backward errors: an operation gives the exact result for operands that are off by as much as its rounding
errors amount to, rounded once more. Errors of a sum of k terms are taken as independent, so that they
grow as the square root of k (Higham, Mary, "A new approach to probabilistic rounding error analysis",
SIAM J. Sci. Comput. 41, 2019). The size of a rounding follows from its dtype.
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
from torchard.functional.programs.flops import flops, is_product
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
    """Where two tensors have the same value; NaNs are the same."""
    return (x == y) | ((x != x) & (y != y))


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floating numbers as this dtype holds them, in double precision.

    Overflow and underflow are no roundings: infinities do not appear, nor zeros.
    """
    if x.is_complex():
        return torch.view_as_complex(rounded(torch.view_as_real(x.resolve_conj()), dtype))
    wide = x.double()
    near = x.to(dtype).double()
    near = torch.where((near == 0) & (wide != 0), wide * (1 + unit_roundoff(dtype)), near)
    return torch.where(near.isfinite(), near, wide)


def rounded_number(x: float, dtype: torch.dtype) -> float:
    """A number as this dtype holds it; see `rounded`."""
    return float(rounded(torch.tensor(x, dtype=torch.float64), dtype))


def narrower(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """Of two floating dtypes the one with the larger roundoff."""
    return _real(dtype) if other is None else max(_real(dtype), other, key=unit_roundoff)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


@dataclass(frozen=True)
class Rounding:
    """Relative errors (standard deviations) of one operation.

    Attributes:
        inside: of its operands, which represent the roundings inside.
        of_result: of its result.
        literals: the dtype that holds the floating numbers among its arguments, where these are values
            of its result: how they are rounded is known.
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

    Moves, views and items of tuples do not, nor do integers and booleans, nor does what is computed from
    small integers, or multiples of one power of two, as long as results and the sums on the way to them
    are such numbers too.

    Args:
        program: over global values.
        values: of every node, in double precision.
        counted: in which real dtype an operation in another counts as done; for a program that stands
            for one in other dtypes.
        inexact: inputs that are rounded before anything is computed from them.
    """
    exact = set(program.placeholders) - set(inexact)
    found: dict[fx.Node, Rounding] = {}
    for node in program.calls:
        floats = filter(is_inexact, _tensors(VAL.of(node)))
        dtypes = [counted(v.dtype) for v in floats]
        units = list(map(unit_roundoff, dtypes))
        computes = bool(units) and not moves(node) and node.target is not operator.getitem
        of_exact = all(source in exact for source in node.all_input_nodes)
        if counts(node) or not units:  # a rounding of its operands moves it by one, or not at all
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

    One rounding has a standard deviation of the unit roundoff over sqrt(3). Functions such as exp are off
    by two roundings in their own dtype. 16-bit operations compute in float32 and round once; sums over
    ranks round the sum of each rank too.
    """
    single = unit / math.sqrt(3)
    held = min(unit, unit_roundoff(torch.float32)) / math.sqrt(3)
    terms = _terms(node)
    inside = 2 * held * math.sqrt(terms) + (single if held < single and terms > 1 else 0.0)
    return Rounding(inside, max(single, 2 * held))


def _terms(node: fx.Node) -> float:
    """How many terms are added up for one element of the result, at most about."""
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


# -- the bits that values take ------------------------------------------------------------------------


def _is_exact(node: fx.Node, values: Mapping[fx.Node, Any], bits: int) -> bool:
    """Whether neither the result nor any sum on the way to it needs more bits than these."""
    operands = [_span(x) for n in node.all_input_nodes for x in _tensors(values[n])]
    results = [x for x in _tensors(values[node]) if is_inexact(x)]
    if any(_bits_of_each(x) > min(bits, _CHANCE) for x in results):
        return False
    terms = math.log2(2 * _terms(node))
    return terms + sum(max(span.high, 0) - min(span.low, 0) for span in operands) <= bits


# Of the 53 bits of a double: rounded results fit in fewer than this by chance, once in thousands.
_CHANCE = 40


def _bits(unit: float) -> int:
    """The bits of a significand, the leading one included."""
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
    """The most significant bits that any one number takes."""
    x = _reals(x)
    x = x[x != 0]
    if not bool(x.isfinite().all()):
        return math.inf
    return int((torch.frexp(x).exponent - _lowest_bit(x)).max()) if x.numel() else 0


def _lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """The exponent of the lowest bit set in each number, none of which is zero."""
    fraction, exponent = torch.frexp(x)
    whole = (fraction * 2.0**53).long()
    lowest = torch.frexp((whole & -whole).double()).exponent - 1
    return exponent - 53 + lowest


def _reals(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
