"""Assertions about the costs of a function: its collectives, residuals, kernels and traces."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.functional.reports.lowered import Lowered
from torchard.functional.saved_residuals import saved_residuals

__all__ = ["assert_collectives", "assert_kernels", "assert_residual_bytes", "max_traces"]


@checked
def assert_collectives(
    fn: Callable[..., Any],
    *args: Any,
    gradients: bool = False,
    bytes: int | None = None,
    **counts: int,
) -> None:
    """Assert which collectives a sharded function runs, without running it.

    Args:
        fn: a function of `shard`, transformed further or not.
        args: its arguments; tensors on ``meta`` and `ShapeDtype` will do.
        gradients: of the joint program: outputs and gradients of all floating arguments.
        bytes: the total that a rank sends; None accepts any number.
        counts: how many of each kind (``all_reduce=2``). Kinds that are not named must not occur.

    Raises:
        AssertionError: other collectives run; the message is the table of collectives.

    >>> import torch, torchard as ta
    >>> from torchard.testing import assert_collectives
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> f = ta.shard(lambda x: x.sum(0), mesh, in_specs=(ta.P("tp"),), out_specs=ta.P())
    >>> assert_collectives(f, torch.ones(4, 2), all_reduce=1, bytes=8)
    >>> assert_collectives(f, torch.ones(4, 2), all_gather=1)
    Traceback (most recent call last):
        ...
    AssertionError: the function runs all_reduce=1, not all_gather=1:
    ...
    """
    collectives = _lowered(fn, args, gradients).collectives
    have = Counter(c.kind for c in collectives)
    want = Counter({kind: n for kind, n in counts.items() if n})
    if have != want:
        raise AssertionError(
            f"the function runs {_listed(have)}, not {_listed(want)}:\n{collectives}"
        )
    sent = sum(c.bytes for c in collectives)
    if bytes is not None and sent != bytes:
        raise AssertionError(f"a rank sends {sent:,} bytes, not {bytes:,}:\n{collectives}")


@checked
def assert_residual_bytes(fn: Callable[..., Any], *args: Any, most: int) -> None:
    """Assert how many bytes of its forward are saved for a function's gradient, without arguments.

    Args:
        fn: a function, transformed or not.
        args: its arguments; tensors on ``meta`` and `ShapeDtype` will do.
        most: the maximum number of bytes, on one device.

    Raises:
        AssertionError: more are saved; the message is the table of residuals.

    >>> import torch, torchard as ta
    >>> from torchard.testing import assert_residual_bytes
    >>> f = ta.checkpoint(lambda x: x.sin().exp().sum())
    >>> assert_residual_bytes(f, torch.ones(1000), most=0)
    """
    residuals = saved_residuals(fn, *args)
    if residuals.bytes > most:
        raise AssertionError(
            f"{residuals.bytes:,} bytes are saved, more than {most:,}:\n{residuals}"
        )


@checked
def assert_kernels(
    fn: Callable[..., Any], *args: Any, gradients: bool = False, **counts: int
) -> None:
    """Assert which fused kernels a function uses, without running it.

    Operations that are left as they are written do not count.

    Args:
        fn: a function of `fuse`, transformed further or not.
        args: its arguments; tensors on ``meta`` and `ShapeDtype` will do.
        gradients: of the joint program: outputs and gradients of all floating arguments.
        counts: how many uses of each kernel, by its name. Kernels that are not named must not occur.

    Raises:
        AssertionError: it uses other kernels; the message lists them, and near misses with their reasons.

    >>> import torch, torchard as ta
    >>> from torchard.testing import assert_kernels
    >>> def f(x, b):
    ...     return torch.nn.functional.gelu(x + b, approximate="tanh")
    >>> assert_kernels(ta.fuse(f, prefer="memory"), torch.ones(4, 8), torch.ones(8), bias_gelu_tanh=1)
    >>> assert_kernels(ta.fuse(f), torch.ones(4, 8), torch.ones(8))             # too small to pay
    """
    kernels = _lowered(fn, args, gradients).kernels
    have = Counter(use.kernel for use in kernels if not str(use.how).startswith("as written"))
    want = Counter({name: n for name, n in counts.items() if n})
    if have != want:
        raise AssertionError(f"the function uses {_listed(have)}, not {_listed(want)}:\n{kernels}")


@contextlib.contextmanager
def max_traces(most: int, *fns: Transformed) -> Iterator[None]:
    """A context that limits how often transformed functions may be traced.

    Args:
        most: how often each may be traced inside.
        fns: transformed functions.

    Returns:
        The context manager.

    Raises:
        AssertionError: a function was traced more often; the message names it.

    >>> import torch, torchard as ta
    >>> from torchard.testing import max_traces
    >>> f = ta.jit(torch.sin, backend="eager")
    >>> with max_traces(1, f):
    ...     _ = f(torch.ones(3)), f(torch.zeros(3))
    >>> with max_traces(1, f):
    ...     _ = f(torch.ones(4)), f(torch.ones(5))
    Traceback (most recent call last):
        ...
    AssertionError: sin was traced 2 times, more than 1
    """
    for fn in fns:
        if not isinstance(fn, Transformed):
            raise TypeError(f"max_traces: {fn!r} was not returned by a transform")
    before = [fn.traces for fn in fns]
    yield
    for fn, count in zip(fns, before, strict=True):
        if fn.traces - count > most:
            raise AssertionError(
                f"{fn.__name__} was traced {fn.traces - count} times, more than {most}"
            )


def _lowered(fn: Callable[..., Any], args: tuple[Any, ...], gradients: bool) -> Lowered:
    run = fn if isinstance(fn, Transformed) else Transformed(fn, ())
    return run.lower_joint(*args) if gradients else run.lower(*args)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name}={n}" for name, n in sorted(counts.items())) or "none"
