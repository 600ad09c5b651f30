"""linearize, linear_transpose, closure_convert: derivatives as functions; closures as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.custom.ruled import said
from torchard.functional.engine.autograd_functions import call
from torchard.functional.engine.cache_entry import CacheEntry
from torchard.functional.tracing.signature import (
    Arguments,
    ShapeDtype,
    paths_of,
    read,
    specs_of_arguments,
)
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import active, called

__all__ = ["closure_convert", "linear_transpose", "linearize"]


@checked
def linearize(fn: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The result of a function, and its derivative there: a linear function of tangents.

    The function runs once, however often its derivative is applied: tangents are pushed forward through
    the transpose of its pullback. Both can be differentiated. In a transformed function both are called;
    in the body of a loop, or a branch, write ``torch.func.jvp(fn, primals, tangents)[1]``.

    Args:
        fn: a function of pytrees.
        primals: its arguments.

    Returns:
        ``fn(*primals)``, and a function of as many tangents, trees like the primals, that returns the
        tangent of the result: None for results that are not floating. Tangents of integers are not read.

    Raises:
        DerivativeError: no argument, or no result, has a floating tensor; or tangents are not like the
            primals, in structure, shapes and dtypes.

    Source: ``jax.linearize``. `torch.func.linearize` has no derivative: its gradient is zero.

    >>> import torch, torchard as ta
    >>> y, push = ta.linearize(torch.sin, torch.tensor(0.0))
    >>> y, push(torch.tensor(2.0)), push(torch.tensor(3.0))
    (tensor(0.), tensor(2.), tensor(3.))
    """
    given = _Floats("linearize", fn, primals)
    found: Any = torch.func.vjp(given, *given.values, has_aux=True)
    floats, pull, tensors = found
    push = torch.func.vjp(pull, tuple(map(torch.zeros_like, floats)))[1]

    def derivative(*tangents: Any) -> Any:
        (made,) = push(tuple(given.like(tangents, given.primals, given.structure, "tangents")))
        return given.result(made, lambda leaf: None)

    kept = iter(tensors)
    return given.result(
        floats, lambda leaf: next(kept) if isinstance(leaf, _Kept) else leaf
    ), derivative


class _Kept:
    """Where a tensor that is not floating is in a result."""


class _Floats:
    """A function of the floating leaves of its arguments, which returns the floating ones of its result.

    Args:
        who: the public function.
        fn: the function.
        args: its arguments.

    Attributes:
        values: the floating leaves.
        returned: once it has run, the leaves of the result, those that are not floating as they are, but
            for tensors.
    """

    def __init__(self, who: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.who, self.fn = who, fn
        self.primals, self.structure = tree.flatten(args)
        self.at = [i for i, leaf in enumerate(self.primals) if is_inexact(leaf)]
        self.values = [self.primals[i] for i in self.at]
        if not self.at:
            raise self._without("argument")
        self.returned: list[Any] = []
        self.out: Any = None

    def __call__(
        self, *floats: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        leaves = [*self.primals]
        for i, x in zip(self.at, floats, strict=True):
            leaves[i] = x
        made, self.out = tree.flatten(self.fn(*tree.unflatten(self.structure, leaves)))
        found = tuple(x for x in made if is_inexact(x))
        if not found:
            raise self._without("result")
        # Specs alone outlive the call.
        self.returned = [
            ShapeDtype(tuple(x.shape), x.dtype, str(x.device))
            if is_inexact(x)
            else _Kept()
            if isinstance(x, torch.Tensor)
            else x
            for x in made
        ]
        return found, [x for x in made if isinstance(x, torch.Tensor) and not is_inexact(x)]

    def result(self, floats: Sequence[torch.Tensor], other: Callable[[Any], Any]) -> Any:
        """A tree like the result, with these floating leaves, and others made of what was returned."""
        rest = iter(floats)
        leaves = [next(rest) if isinstance(x, ShapeDtype) else other(x) for x in self.returned]
        return tree.unflatten(self.out, leaves)

    def like(
        self, given: Any, leaves: Sequence[Any], structure: Any, what: str
    ) -> list[torch.Tensor]:
        """The floating leaves of a tree, which must be like another one's.

        Raises:
            DerivativeError: its structure differs, or a leaf's shape or dtype.
        """
        found, own = tree.flatten(given)
        if own != structure:
            raise DerivativeError(f"{self.who}: {what} are {own}, and must be {structure}.")
        floats = []
        for path, x, leaf in zip(tree.paths(given, what), found, leaves, strict=True):
            if not (is_inexact(leaf) or isinstance(leaf, ShapeDtype)):
                continue
            kind = getattr(x, "shape", None), getattr(x, "dtype", None)
            if kind != (torch.Size(leaf.shape), leaf.dtype):
                raise DerivativeError(
                    f"{self.who}: {path} is {said(x)}, and must be {leaf.dtype} of shape "
                    f"{list(leaf.shape)}."
                )
            floats.append(x)
        return floats

    def _without(self, what: str) -> DerivativeError:
        return DerivativeError(
            f"{self.who}: no {what} has a floating tensor, so there is no derivative."
        )


@checked
def linear_transpose(fn: Callable[..., Any], *primals: Any) -> Callable[..., Any]:
    """The transpose of a linear function, which is not tested to be linear.

    Args:
        fn: a linear function of pytrees of floating tensors.
        primals: its arguments, or `ShapeDtype` like them: values of floating tensors are not read.

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
        given = _Floats("linear_transpose", fn, zeros)
        pull: Any = torch.func.vjp(given, *given.values, has_aux=True)[1]
        floats = given.like(cotangent, given.returned, given.out, "the cotangent")
        found = dict(zip(given.at, pull(tuple(floats)), strict=True))
        return tree.unflatten(given.structure, [found.get(i) for i in range(len(given.primals))])

    return transposed


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, ShapeDtype):
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)
    return torch.zeros_like(leaf) if is_inexact(leaf) else leaf


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

    Raises (when it is called):
        ValueError: arguments or tensors are not like those it was traced with.

    Source: ``jax.closure_convert``.

    >>> import torch, torchard as ta
    >>> w = torch.tensor([1.0, 2.0])
    >>> converted, tensors = ta.closure_convert(lambda x: (w * x).sum(), torch.ones(2))
    >>> torch.func.grad(converted, argnums=1)(torch.tensor([3.0, 4.0]), *tensors)
    tensor([3., 4.])
    """
    arguments, paths = read(args, {}), paths_of(args, {})
    program = trace_call(fn, arguments, paths, called=False)
    tensors = tuple(closure.value for closure in program.closures)
    kinds = _kinds(arguments)
    entry = CacheEntry(fn, program, program, (), arguments, paths, tensors)

    def converted(*args_and_tensors: Any) -> Any:
        given = read(args_and_tensors[: len(args)], {})
        others = args_and_tensors[len(args) :]
        if _kinds(given) != kinds or len(others) != len(tensors):
            raise ValueError(
                f"{program.name}: closure_convert traced it with arguments of other shapes, dtypes or "
                f"static values, and {len(tensors)} tensors follow its {len(args)} arguments: convert it "
                "again."
            )
        state = active()
        if state is None:
            made, leaves = call(entry.lowered, entry.parts(given, others))
            return entry.result(made, leaves, False)
        operands = [state.operand(x) for x in (*given.values, *others)]
        with called():
            made, leaves = call(entry.inlined, state.align_operands(operands))
        return entry.result(made, leaves, True)

    return converted, tensors


def _kinds(arguments: Arguments) -> tuple[Any, ...]:
    """The structure of arguments, the shapes and dtypes of tensors, and all else as it is."""
    leaves = list(arguments.leaves)
    for i, spec in zip(arguments.traced, specs_of_arguments(arguments), strict=True):
        leaves[i] = (tuple(spec.shape), spec.dtype)
    return arguments.structure, leaves
