"""A program evaluated in double precision, as it stands or with roundings put in at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torchard.functional.programs.flops import flops, is_product, op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.functional.tracing.purify import call_pure

__all__ = ["MOVES", "InDouble", "as_double", "coarsest", "is_float", "unit_roundoff"]

# Operations that move values and round none. Those that are missing here cost one rounding too many.
MOVES = frozenset(
    f"aten.{name}"
    for name in (
        *("cat", "clone", "constant_pad_nd", "embedding", "flip", "gather", "index", "index_select"),
        *("masked_fill", "repeat", "roll", "select_scatter", "slice_scatter", "stack", "tril", "triu"),
        *("where", "sort", "topk", "max_pool2d_with_indices"),
    )
)
_DOUBLE = (torch.float64, torch.complex128)


def is_float(value: Any) -> bool:
    """Whether a value is a floating or complex tensor."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def as_double(value: Any) -> Any:
    """A floating or complex tensor in double precision; anything else as it is."""
    if not is_float(value):
        return value
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def coarsest(program: Program) -> float:
    """The unit roundoff of the narrowest floating dtype that a program computes in."""
    vals = pytree.tree_leaves([VAL.get(node) for node in program.calls])
    return max((unit_roundoff(v.dtype) for v in vals if is_float(v)), default=0.0)


def _bits(unit: float) -> int:
    """The bits of a significand, the leading one included."""
    return -round(math.log2(unit))


class InDouble(fx.Interpreter):
    """Evaluates a program with every floating value in double precision.

    With a generator, each operation is given operands that are perturbed at random by as much as its
    rounding errors amount to, and its result is perturbed by one rounding more: the backward error model,
    with errors of a sum of k terms taken as independent, so that they grow as the square root of k
    (Higham, Mary, "A new approach to probabilistic rounding error analysis", 2019). Roundings are those of
    the dtypes that the program computes in. Operations that are exact are not perturbed: moves and views,
    and what is small integers, or multiples of one power of two, before and after.

    Args:
        program: over global values, on one device.
        generator: draws the perturbations; None leaves values as they are.
        roundoff: the least unit roundoff of any operation, for a program that stands for one in a narrower
            dtype.

    Attributes:
        env: after `run`, the value of every node.
    """

    def __init__(
        self, program: Program, generator: torch.Generator | None = None, roundoff: float = 0.0
    ) -> None:
        super().__init__(torch.nn.Module(), garbage_collect_values=False, graph=program.graph)
        self.generator, self.roundoff = generator, roundoff
        self._exact: set[fx.Node] = set()

    def evaluate(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The value of every node, for these inputs in their own precision."""
        with torch.no_grad():
            self.run(*map(as_double, inputs), enable_io_processing=False)
        return self.env

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            self._exact.add(node)
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if self.generator is None or not self._computes(node):
            self._pass_on(node)
            return self._call(node, args, kwargs)
        exact = self._call(node, args, kwargs)
        if self._is_exact(node, args, kwargs, exact):
            self._exact.add(node)
            return exact
        error = self._operand_error(node)
        args, kwargs = pytree.tree_map(lambda x: self._perturbed(x, error), (args, kwargs))
        result = self._call(node, args, kwargs)
        return _zip_map(lambda x, val: self._perturbed(x, 2 * self._unit(val)), result, VAL.of(node))

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            wide = pytree.tree_map(_double_dtype, (args, kwargs))
            return call_pure(node, *wide)
        except (RuntimeError, TypeError):
            # Defined for its own precision alone (a view as another dtype, say).
            given = iter([VAL.get(n) for n in node.all_input_nodes])
            own = {n: next(given) for n in node.all_input_nodes}
            narrow = fx.map_arg(
                (node.args, node.kwargs), lambda n: _as_narrow(self.env[n], own[n])
            )
            return pytree.tree_map(as_double, call_pure(node, *narrow))

    # -- roundings ------------------------------------------------------------------------------

    def _computes(self, node: fx.Node) -> bool:
        """Whether a node's value is rounded at all."""
        vals = pytree.tree_leaves(VAL.of(node))
        moves = is_view(node) or op_name(node) in MOVES or node.target.__name__ == "getitem"  # type: ignore[union-attr]
        return not moves and any(map(is_float, vals))

    def _pass_on(self, node: fx.Node) -> None:
        """What moves exact values is exact."""
        if all(n in self._exact for n in node.all_input_nodes):
            self._exact.add(node)

    def _is_exact(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether neither the result nor any sum on the way to it can be rounded."""
        if not all(n in self._exact for n in node.all_input_nodes):
            return False
        values = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in pytree.tree_leaves(result) if is_float(x)]
        narrowest = min(_bits(self._unit(v)) for v in pytree.tree_leaves(VAL.of(node)) if is_float(v))
        spans = [_span(x) for x in (*values, *results)]
        if None in spans or any(_span_of_each(x) > min(narrowest, 40) for x in results):
            return False
        terms = math.log2(2 * _terms(node))
        largest = sum(max(high, 0) for _, high in spans[: len(values)])  # type: ignore[misc]
        smallest = sum(min(low, 0) for low, _ in spans[: len(values)])  # type: ignore[misc]
        return terms + largest - smallest <= narrowest

    def _unit(self, val: Any) -> float:
        return max(unit_roundoff(val.dtype), self.roundoff) if is_float(val) else 0.0

    def _operand_error(self, node: fx.Node) -> float:
        """The relative perturbation of operands that stands for the roundings inside an operation.

        Sums of 16-bit numbers are held in float32 and rounded once; over ranks, once for each rank.
        """
        unit = max(self._unit(v) for v in pytree.tree_leaves(VAL.of(node)))
        held = min(unit, unit_roundoff(torch.float32))
        return 2 * unit + 2 * held * math.sqrt(_terms(node))

    def _perturbed(self, x: Any, error: float) -> Any:
        if not is_float(x):
            return x
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return x + x * (error * noise).to(x.device)


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


def _double_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value not in _DOUBLE:
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    return value


def _as_narrow(value: Any, val: Any) -> Any:
    return _zip_map(lambda x, v: x.to(v.dtype) if is_float(x) else x, value, val)


def _zip_map(fn: Any, value: Any, vals: Any) -> Any:
    """fn of a tensor and its fake, or of each pair of a tuple."""
    if isinstance(value, (tuple, list)):
        return type(value)(fn(x, v) for x, v in zip(value, vals, strict=True))
    return fn(value, vals)


# -- the bits that values take ------------------------------------------------------------------------


def _span(x: torch.Tensor) -> tuple[int, int] | None:
    """Powers of two (low, high): all numbers are multiples of 2**low and below 2**high in magnitude."""
    x = _reals(x)
    if not bool(x.isfinite().all()):
        return None
    x = x[x != 0]
    if not x.numel():
        return 0, 0
    low, high = _lowest_bit(x), torch.frexp(x).exponent
    return int(low.min()), int(high.max())


def _span_of_each(x: torch.Tensor) -> int:
    """The most significant bits that any one number takes."""
    x = _reals(x)
    x = x[x != 0]
    return int((torch.frexp(x).exponent - _lowest_bit(x)).max()) if x.numel() else 0


def _lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """The exponent of the lowest bit set in each number, none of which is zero."""
    fraction, exponent = torch.frexp(x)
    whole = (fraction * 2.0**53).long()
    lowest = torch.frexp((whole & -whole).double()).exponent - 1
    return exponent - 53 + lowest


def _reals(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.double()
