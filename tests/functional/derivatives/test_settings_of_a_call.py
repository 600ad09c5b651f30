"""A function that runs again for a derivative runs under its call's settings, not the derivative's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import Tensor

from torchard import Mesh, checkpoint, jit, shard

pytestmark = pytest.mark.filterwarnings("ignore:.*backward.. with create_graph")

Fn = Callable[..., Any]
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "jit": lambda fn: jit(fn, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": lambda fn: shard(fn, Mesh({"dp": 2}, virtual=True)),
}


def told() -> float:
    """A number for each setting that operations depend on."""
    made = torch.zeros(2, 2, device="cpu")
    return 2.0 * made.element_size() + 5.0 * torch.zeros(()).is_meta + (made @ made).element_size()


def runs_again(x: Tensor) -> Any:
    """Writes that gradients do not see: derivatives of it run the function itself."""
    mean, y = x.new_zeros(4), x * 2
    with torch.no_grad():
        mean.mul_(0.9).add_(x.mean(0) * 0.1)
        y[0] = 0.0
    return (y * mean * x).sum() * told()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dtype": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def derivatives(
    fn: Fn, call: AbstractContextManager[Any], later: AbstractContextManager[Any]
) -> list[Tensor]:
    x = torch.linspace(0, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    with call:
        y = fn(x)
    with later:
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    return [y.detach(), first.detach(), second]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_of_its_call(setting: str, transform: str) -> None:
    made = SETTINGS[setting]
    plain = contextlib.nullcontext
    fn = TRANSFORMS[transform](runs_again)
    assert (
        derivatives(runs_again, made(), plain())[0] != derivatives(runs_again, plain(), plain())[0]
    )
    for contexts in ((made, plain), (plain, made), (made, made)):
        have, want = (derivatives(f, *(make() for make in contexts)) for f in (fn, runs_again))
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_in_another_thread(transform: str) -> None:
    """Backwards of CUDA devices run in threads of their own, which have no default device."""
    x = torch.linspace(0, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    found: list[list[Tensor]] = []

    def second(y: Tensor) -> None:
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.square().sum(), x)])

    for fn in (runs_again, TRANSFORMS[transform](runs_again)):
        with torch.device("meta"):
            thread = threading.Thread(target=second, args=(fn(x),))
            thread.start()
            thread.join()
    torch.testing.assert_close(found[1], found[0])
