"""What looks for a bug on given arguments: the laws of torchard.testing, and what else there is.

A detector takes a function, the right one, and arguments in float64, and raises an error where it finds
fault. `assert_close`, which has no laws, compares with the right function.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from torchard.testing import (
    check_batching,
    check_derivatives,
    check_dtypes,
    check_pure,
    equal,
    invariant,
)

Fn = Callable[..., Any]
Detector = Callable[[Fn, Fn, tuple[Any, ...]], Any]


def fresh(args: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    return tuple(x.to(dtype, copy=True) if x.is_floating_point() else x.clone() for x in args)


def derivatives(fn: Fn, right: Fn, args: tuple[Any, ...]) -> None:
    """By both modes where the right function has both."""
    modes = ("forward", "reverse") if has_forward(right, args) else ("reverse",)
    check_derivatives(fn, *args, modes=modes)


def has_forward(fn: Fn, args: tuple[Any, ...]) -> bool:
    """Whether the function has a derivative in forward mode."""
    floats = [i for i, x in enumerate(args) if x.is_floating_point()]

    def part(*some: Any) -> Any:
        given = list(args)
        for i, x in zip(floats, some, strict=True):
            given[i] = x
        return fn(*given)

    primals = tuple(args[i] for i in floats)
    try:
        torch.func.jvp(part, primals, primals)
    except Exception:
        return False
    return True


def agrees(fn: Fn, right: Fn, args: tuple[Any, ...]) -> None:
    forward = ("jvp",) if has_forward(right, args) else ()
    equal(fn, right, *args, orders=("value", "gradient", *forward, "second"))


LAWS: dict[str, Detector] = {
    "check_pure": lambda fn, right, args: check_pure(fn, *args),
    "check_derivatives": derivatives,
    "check_dtypes": lambda fn, right, args: check_dtypes(fn, *args),
    "check_batching": lambda fn, right, args: check_batching(fn, *args, orders=("value", "gradient")),
    "equal": agrees,
    "equal, allow_narrower=False": lambda fn, right, args: equal(
        fn, right, *args, orders=("value", "gradient"), allow_narrower=False
    ),
}


def symmetry(action: Fn) -> Detector:
    return lambda fn, right, args: invariant(fn, action, *args, orders=("value", "gradient"))


# -- others -------------------------------------------------------------------------------------------


def gradcheck(fn: Fn, right: Fn, args: tuple[Any, ...]) -> None:
    """torch's own, of first and second derivatives."""
    given = tuple(x.requires_grad_() if x.is_floating_point() else x for x in fresh(args))
    try:
        torch.autograd.gradcheck(fn, given)
        torch.autograd.gradgradcheck(fn, given)
    except GradcheckError as error:
        raise AssertionError(str(error)) from None


def close(fn: Fn, right: Fn, args: tuple[Any, ...]) -> None:
    """Values in float32."""
    single = fresh(args, torch.float32)
    have = fn(*(x.clone() for x in single))
    torch.testing.assert_close(have, right(*single), rtol=1e-5, atol=1e-5)


def pytest_torch(fn: Fn, right: Fn, args: tuple[Any, ...]) -> None:
    """Its inference contract, gradients' check and comparison, less what the right function fails."""
    import pytest_torch as others

    single = fresh(args, torch.float32)
    known = others.check_inference_contract(_Module(right).eval(), single, raise_on_failure=False)
    bad = tuple(result.name for result in known.failures)
    others.check_inference_contract(_Module(fn).eval(), fresh(args, torch.float32), skip=bad)
    others.assert_gradcheck(fn, fresh(args))
    have = fn(*fresh(args, torch.float32))
    others.assert_outputs_close(have, right(*single), rtol=1e-5, atol=1e-5)


class _Module(torch.nn.Module):
    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


RIVALS: dict[str, Detector] = {
    "gradcheck": gradcheck,
    "assert_close": close,
    **({"pytest-torch": pytest_torch} if importlib.util.find_spec("pytest_torch") else {}),
}


@functools.cache
def installed() -> str:
    """The versions of what is compared with."""
    from importlib.metadata import version

    names = [name for name in ("pytest-torch",) if name in RIVALS]
    return ", ".join([f"torch {torch.__version__}", *(f"{n} {version(n)}" for n in names)])
