"""Transforms that change values: the traced function is run through them, before it is differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.errors import DerivativeError
from torchard.functional.derivatives.autodiff import derived_program, split_inputs
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.tracing.purify import call_pure, replay

__all__ = ["ValueRewrite", "interpreted"]


class ValueRewrite:
    """A transform's change of values, made on purpose: quantisation, noise, clipping.

    It says how the inputs and operations of a traced function are computed instead; the function is run
    through it and traced again, before any derivative is taken and before any `Rewrite` runs. So the
    changed function is differentiated, and its derivative may be chosen: ``x + (q(x) - x).detach()`` has
    the value of ``q(x)`` and a straight-through gradient. Several run in the order in which they were
    stacked; their position among the Rewrites does not matter. Hashable: it is part of every cache key.

    >>> import torch
    >>> from torchard.transforms import Transformed, ValueRewrite
    >>> class Round(ValueRewrite):
    ...     def input(self, leaf, value):
    ...         return value + (value.round() - value).detach()            # a straight-through gradient
    >>> f = Transformed(lambda x: x * x, [Round()])
    >>> f(torch.tensor(1.75)), torch.func.grad(f)(torch.tensor(1.75))
    (tensor(4.), tensor(4.))
    """

    @property
    def changes_operations(self) -> bool:
        """Whether operations are computed otherwise, and not only inputs."""
        return type(self).call is not ValueRewrite.call

    def annotate(self, program: Program) -> None:
        """Check the trace of the user's function; raise an error for the user."""

    def input(self, leaf: Leaf, value: torch.Tensor) -> torch.Tensor:
        """The value that the function computes with instead of an input; closures are inputs too."""
        return value

    def call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation for these arguments.

        Args:
            node: the operation; its tags are those of everything computed here.
        """
        return call_pure(node, tuple(args), dict(kwargs))


def interpreted(program: Program, rewrite: ValueRewrite, opaque: bool) -> Program:
    """The program of a traced function, computed as a rewrite says.

    Args:
        opaque: whether the program's operations do not determine its derivatives.

    Raises:
        DerivativeError: it replaces operations of a function whose gradient is not that of its
            operations, because it switches gradients off or calls an autograd.Function.
    """
    rewrite.annotate(program)
    count, inputs = split_inputs(program)
    leaves = [leaf for leaf, _ in inputs]
    if opaque and rewrite.changes_operations:
        raise DerivativeError(
            f"{type(rewrite).__name__} replaces operations of {program.name}, whose gradient does not "
            "follow from its operations, because it switches gradients off or calls an "
            "autograd.Function. Write .detach() instead of torch.no_grad(), or change inputs only "
            "(ValueRewrite.input)."
        )

    def fn(values: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [rewrite.input(leaf, x) for leaf, x in zip(leaves, values[:count], strict=True)]
        given += values[count:]
        if program.retrace is not None:
            return program.retrace(given)
        return replay(program.graph, given, rewrite.call)

    derived = derived_program(program, fn, inputs, lambda: list(program.outputs))
    trees = {"in_tree": program.in_tree, "out_tree": program.out_tree}
    return replace(derived, **trees)
