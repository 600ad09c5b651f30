"""A program evaluated in double precision, unchanged or with random roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.accessors import pytree
from torchard.functional.tracing.purify import call_pure
from torchard.testing.rounding.roundings import Rounding, rounded_number

__all__ = ["InDouble", "Perturbed", "as_double"]

_DOUBLE = (torch.float64, torch.complex128)


class InDouble(fx.Interpreter):
    """Evaluates a program with every floating value in double precision.

    Args:
        program: a program over global values, on one device.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(torch.nn.Module(), garbage_collect_values=False, graph=program.graph)

    def evaluate(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The value of every node, given the inputs in their own precision."""
        with torch.no_grad():
            self.run(*map(as_double, inputs), enable_io_processing=False)
        return self.env

    def run_node(self, node: fx.Node) -> Any:
        """The value of one node."""
        if node.op != "call_function":
            return super().run_node(node)
        return self.call(node, *self.fetch_args_kwargs_from_env(node))

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of a call with these arguments."""
        try:
            wide: Any = map_aggregate((args, kwargs), _double_dtype)
            result = call_pure(node, *wide)
        except (RuntimeError, TypeError):
            return self._in_own_precision(node)
        if _has_known_shape(node, result):
            return result
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            return map_aggregate(VAL.of(node), as_double)  # from the recorded run
        return self._in_own_precision(node)

    def _in_own_precision(self, node: fx.Node) -> Any:
        """The value of a call that needs the recorded dtypes: a view of bits as another dtype."""
        narrow = fx.map_arg(
            (node.args, node.kwargs), lambda n: _as_narrow(self.env[n], VAL.get(n))
        )
        return map_aggregate(call_pure(node, *narrow), as_double)


# Kernels that subtract a value that they compute (the logarithm of a sum, a mean gradient) from their
# operand. The rounding error of this value remains, even if the difference is small.
_SUBTRACT = ("aten._log_softmax", "aten._log_softmax_backward_data")
# Kernels that scale their operand and then subtract the scaled mean.
_CENTER = (
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
)


class Perturbed(InDouble):
    """Evaluates a program in double precision, with random errors of the size of its roundings.

    Args:
        program: a program over global values, on one device.
        roundings: the errors of each call that rounds.
        generator: the generator of the random errors.
    """

    def __init__(
        self, program: Program, roundings: Mapping[fx.Node, Rounding], generator: torch.Generator
    ) -> None:
        super().__init__(program)
        self.roundings, self.generator = roundings, generator

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of a call, whose operands and result are perturbed."""
        rounding = self.roundings.get(node)
        if rounding is None:
            return super().call(node, args, kwargs)
        if rounding.literals is not None:
            args, kwargs = map_aggregate((args, kwargs), _literal_in(rounding.literals))
        args, kwargs = self._perturbed((args, kwargs), rounding.inside)
        result = super().call(node, args, kwargs)
        if op_name(node) in _SUBTRACT:
            result = result + (args[0] - result) * self._noise(result, rounding.of_result)
        elif op_name(node) in _CENTER:
            normal, mean, scale, *others = result
            if mean.numel():  # statistics of the batch
                subtracted = (mean * scale).view(-1, *[1] * (normal.ndim - 2))
                normal = normal + subtracted * self._noise(normal, rounding.of_result)
            result = (normal, mean, scale, *others)
        return self._perturbed(result, rounding.of_result)

    def _noise(self, like: torch.Tensor, error: float) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=self.generator, dtype=like.dtype)
        return (error * noise).to(like.device)

    def _perturbed(self, values: Any, error: float) -> Any:
        if not error:
            return values

        def perturb(x: Any) -> Any:
            if not is_inexact(x):
                return x
            moved = x + x * self._noise(x, error)
            return torch.where(x.isfinite(), moved, x)  # infinities are not rounded

        return map_aggregate(values, perturb)


def _has_known_shape(node: fx.Node, value: Any) -> bool:
    known, found = pytree.tree_leaves(VAL.of(node)), pytree.tree_leaves(value)
    pairs = zip(known, found, strict=True)
    return all(a.shape == b.shape for a, b in pairs if isinstance(a, torch.Tensor))


def as_double(value: Any) -> Any:
    """A floating or complex tensor in double precision; any other value unchanged."""
    if not is_inexact(value):
        return value
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def _literal_in(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda x: rounded_number(x, dtype) if isinstance(x, float) else x


def _double_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value not in _DOUBLE:
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    return value


def _as_narrow(value: Any, val: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_as_narrow(x, v) for x, v in zip(value, val, strict=True))
    return value.to(val.dtype) if is_inexact(value) else value
