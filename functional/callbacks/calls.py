"""debug.print, debug.callback, io_callback, pure_callback: Python functions of a program's values."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from torchard.functional.callbacks.effect import performed
from torchard.functional.callbacks.pure import called
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.tensor_spec import TensorSpec, contiguous
from torchard.functional.custom.custom_vjp import custom_vjp
from torchard.functional.custom.ruled import TensorTree
from torchard.functional.guards.present_cells import is_filled, with_present_cells
from torchard.functional.programs.markers import Effect, PureCall
from torchard.functional.tracing.trace_state import active

__all__ = [
    "callback",
    "called_for_effect",
    "io_callback",
    "print",
    "print_cotangent",
    "pure_callback",
]


@checked
def print(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print values when they are computed: ``fmt.format(*args, **kwargs)``.

    Once for each evaluation of the function as written: in a loop once an iteration, in a branch if it is
    taken, under vmap once for each example, in the order of the source. A backward does not print
    again what it recomputes. On a mesh one rank prints, whole values. Values are printed where the
    forward runs; `print_cotangent` prints in the backward.

    Args:
        fmt: a format string.
        args, kwargs: what it formats: trees of tensors and anything else. Tensors without dims are
            formatted like numbers.

    Returns:
        None.

    Source: ``jax.debug.print``.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def f(x):
    ...     ta.debug.print("the sum is {s:.2f}", s=x.sum())
    ...     return x.sin().sum()
    >>> f(torch.ones(3)); torch.func.grad(f)(torch.ones(3))
    the sum is 3.00
    tensor(2.5244)
    the sum is 3.00
    tensor([0.5403, 0.5403, 0.5403])
    """

    def show(*args: Any, **kwargs: Any) -> None:
        builtins.print(fmt.format(*args, **kwargs))

    _perform("debug.print", show, args, kwargs)


@checked
def callback(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a function with values when they are computed, as `print` does: what it returns is ignored.

    Args:
        fn: any function, which may have effects.
        args, kwargs: its arguments: trees of tensors and anything else. Their tensors have values, and
            no gradients.

    Returns:
        None.

    Source: ``jax.debug.callback``.

    >>> import torch, torchard as ta
    >>> losses = []
    >>> @ta.jit
    ... def train(w):
    ...     def step(i, w):
    ...         ta.debug.callback(lambda w: losses.append(float(w)), w)
    ...         return w / 2
    ...     return ta.fori_loop(0, 4, step, w)
    >>> train(torch.tensor(8.0)), losses
    (tensor(0.5000), [8.0, 4.0, 2.0, 1.0])
    """
    _perform("debug.callback", fn, args, kwargs)


def print_cotangent(fmt: str, x: Any) -> Any:
    """The identity, which prints the cotangent of its argument in each backward.

    Args:
        fmt: a format string for the cotangent, ``"{}"``.
        x: a tensor.

    Returns:
        x, of which the result must be computed for anything to be printed.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def f(x):
    ...     return ta.debug.print_cotangent("d/dx: {:.1f}", x) ** 2
    >>> torch.func.grad(f)(torch.tensor(3.0))
    d/dx: 6.0
    tensor(6.)
    """
    identity = custom_vjp(lambda x: x)

    def bwd(_: None, cotangent: Any) -> Any:
        print(fmt, cotangent)
        return (cotangent,)

    identity.defvjp(lambda x: (x, None), bwd)
    return identity(x)


@checked
def io_callback(fn: Callable[..., Any], results: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with effects, and use what it returns: once, in order, as `debug.callback` does.

    Args:
        fn: any function.
        results: a tree of what it returns: `ShapeDtype` or tensors.
        args, kwargs: its arguments.

    Returns:
        What fn returns; it has no derivative.

    Raises:
        DerivativeError: a derivative needs the result a second time.
        ValueError (when it runs): fn returns something else than ``results``.

    Source: ``jax.experimental.io_callback``.

    >>> import torch, torchard as ta
    >>> numbers = iter(range(10))
    >>> @ta.jit
    ... def f(x):
    ...     n = ta.io_callback(lambda: torch.tensor(next(numbers)), ta.ShapeDtype((), torch.int64))
    ...     return x + n
    >>> f(torch.zeros(2)), f(torch.zeros(2))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    return _perform("io_callback", fn, args, kwargs, results)


@checked
def pure_callback(
    fn: Callable[..., Any], results: Any, *args: Any, vectorized: bool = False, **kwargs: Any
) -> Any:
    """Use what a function without effects returns, that cannot be traced: of NumPy, SciPy, a simulator.

    It may be called any number of times, or not at all if nothing depends on its result; on a mesh every
    rank calls it, with whole values.

    Args:
        fn: a function whose result is determined by its arguments.
        results: a tree of what it returns: `ShapeDtype` or tensors.
        args, kwargs: its arguments: trees of tensors and anything else.
        vectorized: whether, under vmap, fn takes all examples at once along dim 0 of each tensor; else it
            is called once for each.

    Returns:
        What fn returns. It has no derivative; `custom_vjp` states one.

    Raises:
        DerivativeError: it is differentiated.
        ValueError (when it runs): fn returns something else than ``results``.

    Source: ``jax.pure_callback``.

    >>> import numpy as np, torch, torchard as ta
    >>> @ta.jit
    ... def ranks(x):
    ...     order = lambda x: torch.from_numpy(np.argsort(x.numpy()))
    ...     return ta.pure_callback(order, ta.ShapeDtype((3,), torch.int64), x) * 2
    >>> ranks(torch.tensor([3.0, 1.0, 2.0]))
    tensor([2, 4, 0])
    """
    given, run, specs, build = _prepared(fn, args, kwargs, results)
    call = PureCall(run, called, specs, vectorized, source.begins_here())
    return build(call(*given))


def called_for_effect(
    name: str, fn: Callable[..., Any], args: Any, everywhere: bool = False
) -> None:
    """Call a function with values when they are computed.

    Args:
        everywhere: whether each rank of a mesh calls it.
    """
    _perform(name, fn, args, {}, everywhere=everywhere)


def _perform(
    name: str,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    results: Any = None,
    everywhere: bool = False,
) -> Any:
    given, run, specs, build = _prepared(fn, args, kwargs, results)
    effect = Effect(name, run, performed, specs, source.begins_here(), everywhere)
    return build(performed(effect, given)[1:])


def _prepared(
    fn: Callable[..., Any], args: Any, kwargs: Any, results: Any
) -> tuple[list[torch.Tensor], Callable[..., Any], tuple[TensorSpec, ...], Callable[..., Any]]:
    """The tensors of a call, fn as a function of them, the specs of its results, and their tree."""
    arguments, state = TensorTree((args, kwargs)), active()
    given = arguments.tensors((args, kwargs))
    if state is not None:
        given = list(map(state.operand, given))
    expected, out = tree.flatten(results)
    specs = [
        contiguous(tuple(x.shape), x.dtype, torch.device(x.device))
        for x in expected
        if x is not None
    ]
    # As they are now, unless it assigns to them: a loop's variables have other values when it is called.
    called_later = fn if _assigns(fn) else with_present_cells(fn)

    def run(*values: torch.Tensor) -> Any:
        some, named = arguments.build(values)
        return called_later(*some, **named)

    return given, run, tuple(specs), lambda made: tree.unflatten(out, made) if specs else None


def _assigns(fn: Any, known: frozenset[int] = frozenset()) -> bool:
    """Whether a function, or one that it closes over, assigns to a variable around it."""
    if not isinstance(fn, FunctionType) or id(fn) in known:
        return False
    names = {each.argval for each in dis.get_instructions(fn) if each.opname == "STORE_DEREF"}
    if not names.isdisjoint(fn.__code__.co_freevars):
        return True
    inner = (cell.cell_contents for cell in fn.__closure__ or () if is_filled(cell))
    return any(_assigns(each, known | {id(fn)}) for each in inner)
