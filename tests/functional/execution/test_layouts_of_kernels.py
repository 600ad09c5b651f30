"""What torch's own kernels return, in code that a compiler made for what their shapes say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from torchard.functional import jit

Tensor = torch.Tensor


def _columns(x: Tensor) -> Tensor:
    """A copy whose columns lie one after another."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


# What an operator makes of x.
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": torch.clone,
    "columns": _columns,
    "a view of more": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1].clone().expand(x.shape),
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "conjugated": lambda x: x.clone().conj(),
    "negated": lambda x: torch._neg_view(x.clone()),
}
# How it returns that, and what is taken of what it returns.
RETURNS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "Tensor": (lambda make, x: make(x), lambda y: y),
    "(Tensor, Tensor)": (lambda make, x: (x.clone(), make(x)), lambda y: y[1] + y[0]),
    "Tensor[]": (lambda make, x: [make(x), make(x) * 2], lambda y: y[0] * 3 - y[1].mT.sum()),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "computed": lambda y: y.sin() + 1,
    "viewed": lambda y: y.mT[1:],
    "flat": lambda y: y.flatten() * 2,
    "parts": lambda y: y.resolve_conj().real * 2 if y.is_complex() else y * 2,
    "multiplied": lambda y: y @ y.mT,
    "catted": lambda y: torch.cat([y, y * 2]),
    "written": lambda y: y.select_scatter(y[1], 0, 0),
}


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Operators whose functions of shapes say: contiguous, and nothing lazy."""
    library = torch.library.Library("torchard_test_layouts", "FRAGMENT")
    for (kernel, make), (returns, (wrapped, _)) in product(KERNELS.items(), RETURNS.items()):
        name = _name(kernel, returns)

        def real(x: Tensor, make: Any = make, wrapped: Any = wrapped) -> Any:
            return wrapped(make, x)

        def fake(x: Tensor, wrapped: Any = wrapped) -> Any:
            return wrapped(lambda x: torch.empty(x.shape, dtype=x.dtype), x.contiguous())

        library.define(f"{name}(Tensor x) -> {returns}")
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"torchard_test_layouts::{name}", fake, lib=library)
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_results_are_read_as_they_lie(dtype: torch.dtype) -> None:
    """Of operators whose layouts are not those of their functions of shapes; one function of many."""
    x = torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(0))

    def some(x: Tensor) -> dict[str, Tensor]:
        return {
            f"{kernel}, {returns}, {use}": USES[use](RETURNS[returns][1](op(kernel, returns)(x)))
            for kernel, returns, use in list(product(KERNELS, RETURNS, USES))[::5]
        }

    have, want = jit(some)(x), some(x)
    wrong = [name for name in want if not torch.allclose(have[name], want[name], atol=1e-5)]
    assert not wrong


def op(kernel: str, returns: str) -> Any:
    return getattr(torch.ops.torchard_test_layouts, _name(kernel, returns))


def _name(kernel: str, returns: str) -> str:
    return f"kernel_{list(KERNELS).index(kernel)}_{list(RETURNS).index(returns)}"
