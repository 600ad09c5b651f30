"""linearize, linear_transpose, closure_convert: derivatives as functions; closures as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.engine.transformed import Transformed
from torchard.functional.execution.codegen import compiled
from torchard.functional.tracing.signature import ShapeDtype, paths_of, read
from torchard.functional.tracing.trace_call import trace_call

__all__ = ["closure_convert", "linear_transpose", "linearize"]


@checked
def linearize(fn: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The result of a function, and its derivative there: a linear function of tangents.

    The function runs once, however often its derivative is applied: tangents are pushed forward through
    the transpose of its pullback. Both can be differentiated, and called in transformed functions.

    Args:
        fn: a function of pytrees.
        primals: its arguments.

    Returns:
        ``fn(*primals)``, and a function of as many tangents, trees like the primals, that returns the
        tangent of the result: None for results that are not floating. Tangents of integers are not read.

    Raises:
        DerivativeError: no argument, or no result, has a floating tensor; or another number of tangents
            is given.

    Source: ``jax.linearize``. `torch.func.linearize` has no derivative: its gradient is zero.

    >>> import torch, torchard as ta
    >>> y, push = ta.linearize(torch.sin, torch.tensor(0.0))
    >>> y, push(torch.tensor(2.0)), push(torch.tensor(3.0))
    (tensor(0.), tensor(2.), tensor(3.))
    """
    leaves, structure = tree.flatten(primals)
    of_floats, at = _of_floats("linearize", fn, leaves, structure)
    primal: Any = torch.func.vjp(of_floats, *(leaves[i] for i in at), has_aux=True)
    outs, pull, out = primal
    push = torch.func.vjp(pull, tuple(map(torch.zeros_like, outs)))[1]

    def derivative(*tangents: Any) -> Any:
        given = tree.leaves(tangents)
        if len(given) != len(leaves):
            raise DerivativeError(
                f"linearize: {len(given)} tangents were given, of {len(leaves)} leaves of the primals."
            )
        (made,) = push(tuple(given[i] for i in at))
        found = iter(made)
        return tree.map(lambda x: next(found) if is_inexact(x) else None, out[0])

    return out[0], derivative


def _of_floats(
    who: str, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any
) -> tuple[Callable[..., Any], list[int]]:
    """fn of its floating leaves, as it gives its floating results and, besides, all of them."""
    at = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]
    if not at:
        raise DerivativeError(f"{who}: no argument has a floating tensor, so there is no derivative.")

    def run(*primals: torch.Tensor) -> Any:
        given = [*leaves]
        for i, x in zip(at, primals, strict=True):
            given[i] = x
        out = fn(*tree.unflatten(structure, given))
        floats = tuple(filter(is_inexact, tree.leaves(out)))
        if not floats:
            raise DerivativeError(f"{who}: no result has a floating tensor, so there is no derivative.")
        return floats, [out]

    return run, at


@checked
def linear_transpose(fn: Callable[..., Any], *primals: Any) -> Callable[..., Any]:
    """The transpose of a linear function, which is not tested to be linear.

    Args:
        fn: a linear function of pytrees of floating tensors.
        primals: its arguments, or `ShapeDtype` like them: their values are not read.

    Returns:
        A function of a cotangent, a tree like the result of ``fn``, that returns a tuple with a tree like
        each of the primals.

    Source: ``jax.linear_transpose``.

    >>> import torch, torchard as ta
    >>> transposed = ta.linear_transpose(lambda x: x.cumsum(0), ta.ShapeDtype((3,)))
    >>> transposed(torch.tensor([1.0, 0.0, 2.0]))
    (tensor([3., 2., 2.]),)
    """
    zeros = tree.map(_zeros, primals)

    def transposed(cotangent: Any) -> Any:
        leaves, structure = tree.flatten(zeros)
        of_floats, at = _of_floats("linear_transpose", fn, leaves, structure)
        pull: Any = torch.func.vjp(of_floats, *(leaves[i] for i in at), has_aux=True)[1]
        found = dict(zip(at, pull(tuple(filter(is_inexact, tree.leaves(cotangent)))), strict=True))
        return tree.unflatten(structure, [found.get(i) for i in range(len(leaves))])

    return transposed


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, ShapeDtype):
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


@checked
def closure_convert(
    fn: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """A function without closures, and the tensors that it was closed over.

    `custom_vjp`, `implicit.root` and the like differentiate in arguments alone; with this, in the tensors
    that a function of someone else closes over, too.

    Args:
        fn: a pure function of pytrees.
        args: arguments, or `ShapeDtype` like them, with which it is traced.

    Returns:
        ``converted`` and ``tensors``: ``converted(*args, *tensors)`` is ``fn(*args)``, for arguments of
        the same structure, shapes, dtypes and static values.

    Raises:
        DerivativeError: its derivative is not that of its operations, because it has a rule, or switches
            gradients off; pass what it closes over as arguments.

    Source: ``jax.closure_convert``.

    >>> import torch, torchard as ta
    >>> w = torch.tensor([1.0, 2.0])
    >>> converted, tensors = ta.closure_convert(lambda x: (w * x).sum(), torch.ones(2))
    >>> torch.func.grad(converted, argnums=1)(torch.tensor([3.0, 4.0]), *tensors)
    tensor([3., 4.])
    """
    arguments = read(args, {})
    program = trace_call(fn, arguments, paths_of(args, {}), called=False)
    if program.retrace is not None:
        raise DerivativeError(
            f"closure_convert: {program.name} has a rule for its derivative, or switches gradients off: "
            "its operations do not determine its derivative. Pass the tensors that it reads as arguments."
        )
    run = compiled(program.graph, program.name)
    tensors = tuple(closure.value for closure in program.closures)
    constants, out_tree = program.constants, program.out_tree

    def converted(*args_and_tensors: Any) -> Any:
        given = args_and_tensors[: len(args)]
        operands = read(given, {}).values
        return out_tree.build(run((*operands, *args_and_tensors[len(args) :], *constants)))

    return Transformed(converted, ()), tensors  # whose derivatives are those of its program
