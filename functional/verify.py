"""verify: compare the outputs and gradients of a function with a reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.tracing.signature import paths_of

__all__ = ["TOLERANCE", "Report", "Row", "verify"]

# Relative to the largest absolute value of the reference; a few hundred roundings each.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.complex128: 1e-12,
    torch.complex64: 1e-5,
}


@dataclass(frozen=True)
class Row:
    """One compared value: the relative errors of fn, and of the reference in the same precision.

    The ``dtype`` of a value that is not a tensor is its type; the error of one that is not a number is 0
    or infinite.
    """

    path: str
    dtype: torch.dtype | type
    error: float
    eager: float
    tolerance: float
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether the error is within tolerance, or no larger than the reference's in this precision."""
        close = self.error <= self.tolerance or self.error <= self.eager
        return not self.problem and close


def _dtype_text(kind: torch.dtype | type) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("torch.")


class Report(list[Row]):
    """The rows of a comparison; prints as a table."""

    def __str__(self) -> str:
        width = max([len(row.path) for row in self] or [0])
        head = f"{'value'.ljust(width)}  {'dtype':9}  {'error':>9}  {'eager':>9}  tolerance"
        lines = [
            f"{row.path.ljust(width)}  {_dtype_text(row.dtype):9}  "
            f"{row.error:9.2e}  {row.eager:9.2e}  {row.tolerance:9.2e}"
            f"{'' if row.good else '  <-- ' + (row.problem or 'differs')}"
            for row in self
        ]
        return "\n".join([head, *lines])


@checked
def verify(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    grads: bool = True,
    tolerance: Annotated[float, AtLeast(0)] | None = None,
) -> Report:
    """Compare a function with a reference on the same arguments: outputs and all gradients.

    The reference runs in float64 (on whole values where ``fn`` gets placed ones) and again in the
    arguments' own precision. A value passes if its error against float64, relative to the largest entry,
    is within the tolerance of its dtype, or no larger than the error of the reference's second run.
    Gradients are those of the sum of the floating outputs times fixed pseudo-random cotangents, with
    respect to every floating tensor in ``args``. Results that are not tensors are compared as well, and
    so is the structure of the result.

    Args:
        fn: the function under test.
        reference: a plain function that computes the same.
        args: the arguments of both; placed values are gathered for the reference.
        grads: whether to compare gradients too.
        tolerance: the relative error that is allowed in every value, >= 0; by default it depends on the
            dtype (1e-12 for float64, 1e-5 for float32).

    Returns:
        A report with one row per value; print it.

    Raises:
        AssertionError: a value differs; the message is the report.

    Source: Thunder's criterion for kernels, no further from float64 than eager execution.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def f(x):
    ...     return x.softmax(-1)
    >>> x = ta.place(torch.eye(4), mesh, ta.P(None, "tp"))
    >>> [(row.path, row.good) for row in ta.verify(ta.shard(f, mesh), f, x)]
    [('out', True), ('gradient of args[0]', True)]
    >>> ta.verify(lambda x: 3 * x, lambda x: 2 * x, torch.eye(2))
    Traceback (most recent call last):
        ...
    AssertionError: fn differs from its reference:
    value                dtype          error      eager  tolerance
    out                  float32     5.00e-01   0.00e+00   1.00e-05  <-- differs
    gradient of args[0]  float32     5.00e-01   ...        1.00e-05  <-- differs
    """
    gathered = tree.map(_detached, tree.whole(args))
    exact = _run(reference, _map_floats(lambda t: t.to(_wide(t.dtype)), gathered), grads)
    eager = _run(reference, gathered, grads)
    ours = _run(fn, args, grads)
    report = Report(
        _compare(path, ours.of(path), exact.of(path), eager.of(path), tolerance)
        for path in dict.fromkeys([*exact.values, *ours.values])
    )
    if all(row.good for row in report) and ours.structure != eager.structure:
        report.append(_other_structure(ours.structure, eager.structure))
    if not all(row.good for row in report):
        raise AssertionError(f"fn differs from its reference:\n{report}")
    return report


_ABSENT = object()


class _Values(NamedTuple):
    """The results of a run: outputs and gradients by path, and the structure of the outputs."""

    values: dict[str, Any]
    structure: Any

    def of(self, path: str) -> Any:
        return self.values.get(path, _ABSENT)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _map_floats(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return tree.map(lambda leaf: fn(leaf) if _is_float(leaf) else leaf, value)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _run(fn: Callable[..., Any], args: Any, grads: bool) -> _Values:
    """Run a function; its outputs and gradients by path, and the structure of the outputs."""
    leaves, structure = tree.flatten(args)
    if grads:
        leaves = [
            leaf.detach().clone().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves
        ]
    args = tree.unflatten(structure, leaves)
    with torch.enable_grad() if grads else torch.no_grad():
        output = tree.whole(fn(*args))
    named = dict(zip(tree.paths(output, "out"), tree.leaves(output), strict=True))
    values = {path: _detached(leaf) for path, leaf in named.items()}
    if grads:
        values |= _gradients(list(named.values()), leaves, structure)
    return _Values(values, tree.structure(output))


def _gradients(
    outputs: list[Any], leaves: list[Any], structure: Any
) -> dict[str, torch.Tensor]:
    """The gradients of the floating leaves by path, for fixed pseudo-random cotangents."""
    differentiable = [out for out in outputs if _is_float(out) and out.requires_grad]
    inputs = [leaf for leaf in leaves if _is_float(leaf)]
    if not differentiable or not inputs:
        return {}
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        for out in differentiable
    ]
    values = torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True)
    by_leaf = iter(values)
    filled = [_or_zeros(next(by_leaf), leaf) if _is_float(leaf) else None for leaf in leaves]
    gradients = tree.whole(tree.unflatten(structure, filled))
    paths = paths_of(gradients, {})
    flat = tree.leaves(gradients)
    return {
        f"gradient of {path}": value
        for path, value in zip(paths, flat, strict=True)
        if value is not None
    }


def _or_zeros(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if value is None else value


def _compare(path: str, ours: Any, exact: Any, eager: Any, tolerance: float | None) -> Row:
    """The row of a value.

    A value that is not a tensor is compared with that of the reference in fn's own precision: it may be
    a dtype, or depend on one.
    """
    kind = ours.dtype if isinstance(ours, torch.Tensor) else type(ours)
    if problem := _misfit(ours, eager):
        return Row(path, kind, float("inf"), 0.0, 0.0, problem)
    if not isinstance(ours, (torch.Tensor, float, complex)):
        return Row(path, kind, 0.0, 0.0, 0.0)
    if type(exact) is not type(eager) or getattr(exact, "shape", ()) != getattr(ours, "shape", ()):
        problem = "the reference returns something else in float64"
        return Row(path, kind, float("inf"), 0.0, 0.0, problem)
    precision = ours.dtype if isinstance(ours, torch.Tensor) else torch.float64
    allowed = TOLERANCE.get(precision, 0.0) if tolerance is None else tolerance
    return Row(path, kind, _error(ours, exact), _error(eager, exact), allowed)


def _misfit(ours: Any, eager: Any) -> str:
    """Why two values cannot agree whatever their numbers, by shape, dtype or type; else empty."""
    if ours is _ABSENT or eager is _ABSENT:
        return f"{'fn' if ours is _ABSENT else 'the reference'} has no such value"
    if isinstance(ours, torch.Tensor) and isinstance(eager, torch.Tensor):
        if ours.shape != eager.shape:
            return f"shape {list(ours.shape)}, reference {list(eager.shape)}"
        return "" if ours.dtype == eager.dtype else f"dtype, reference has {eager.dtype}"
    if type(ours) is not type(eager):
        return f"a {type(ours).__name__}, reference a {type(eager).__name__}"
    if isinstance(ours, (float, complex)):
        return ""
    return _unequal(ours, eager)


def _unequal(ours: Any, eager: Any) -> str:
    try:
        equal = ours is eager or bool(torch.as_tensor(ours == eager).all())
    except (TypeError, ValueError, RuntimeError):  # == gave neither a bool nor an array of bools
        return _incomparable(ours)
    by_identity: Any = object.__eq__
    if not equal and type(ours).__eq__ is by_identity:
        return _incomparable(ours)
    return "" if equal else f"{ours!r}, reference {eager!r}"


def _incomparable(value: Any) -> str:
    return (
        f"a {type(value).__name__} cannot be compared: register it with torchard.tree.register, "
        "or return the parts that are to be compared"
    )


def _other_structure(ours: Any, eager: Any) -> Row:
    problem = f"the tree of results is {ours}, reference {eager}"
    return Row("out", object, float("inf"), 0.0, 0.0, problem)


def _error(value: Any, exact: Any) -> float:
    """The largest absolute difference over the largest finite entry; equal NaNs and infinities agree."""
    value, exact = _as_wide(value), _as_wide(exact)
    if not exact.numel():
        return 0.0
    same = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (value - exact).abs())
    if not bool(difference.isfinite().all()):
        return float("inf")
    scale = torch.where(exact.isfinite(), exact.abs(), 0.0).max()
    return float(difference.max() / scale) if scale > 0 else float(difference.max())


def _as_wide(value: Any) -> torch.Tensor:
    """The value as a double-precision tensor on the CPU; integers too."""
    if isinstance(value, torch.Tensor):
        return value.to("cpu", _wide(value.dtype))
    kind = torch.complex128 if isinstance(value, complex) else torch.float64
    return torch.tensor(value, dtype=kind)
