"""Patterns of unusual operands and results: found or not, what is computed is the plain function's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor
from torch.func import grad

from torchard import Kernel, NoMatch, Pattern, PatternError, find
from torchard.functional.core.tree import leaves
from torchard.kernels import any_of, call

X, Y, B = (
    torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(3, 8),
    torch.linspace(1, -1, 24, dtype=torch.float64).reshape(3, 8).sin(),
    torch.linspace(0, 1, 8, dtype=torch.float64),
)
I = torch.arange(9).reshape(3, 3)  # noqa: E741
SCALE = torch.tensor(2.0)
anything = call(lambda name: True)
one_of_two = call(lambda name: name in ("relu", "tanh"))

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], int]

# What is written, what is looked for, of what, and how often it is there.
CASES: dict[str, Case] = {
    "the larger of two": (
        lambda x, y: torch.maximum(y, x.sin()).exp(),
        lambda x, y: torch.maximum(x.sin(), y).exp(),
        (X, Y),
        1,
    ),
    "relu as a maximum": (
        lambda x: torch.maximum(torch.zeros_like(x), x).exp(), lambda x: F.relu(x).exp(), (X,), 1
    ),
    "filled with a value": (
        lambda x, y: torch.where(y > 0, y.sum(), x).exp(),
        lambda x, y: x.masked_fill(y > 0, y.sum()).exp(),
        (X, Y),
        1,
    ),
    "filled with another value": (
        lambda x, y: torch.where(y > 0, y.amax(), x).exp(),
        lambda x, y: x.masked_fill(y > 0, y.sum()).exp(),
        (X, Y),
        0,
    ),
    "a value for a number": (
        lambda x, y: torch.where(x > 0, x.exp(), y),
        lambda x: torch.where(x > 0, x.exp(), 0.5),
        (X, Y),
        0,
    ),
    "a result that is an input": (
        lambda x, b: (x, F.gelu(x + b)), lambda x, b: (x, F.gelu(x + b)), (X, B), 0
    ),
    "any operation, twice the same": (
        lambda x: x.relu() * x.relu().sin(),
        lambda x: (h := one_of_two(x)) * h.sin(),
        (X,),
        1,
    ),
    "any operation, but not two": (
        lambda x: x.relu() * x.tanh().sin(),
        lambda x: (h := one_of_two(x)) * h.sin(),
        (X,),
        0,
    ),
    "any operation of one operand": (
        lambda x, y: torch.atan2(x, y).exp(), lambda x: anything(x).exp(), (X, Y), 0
    ),
    "any operation of two operands": (
        lambda x, y: torch.atan2(x, y).exp(), lambda x, y: anything(x, y).exp(), (X, Y), 1
    ),
    "more values joined": (
        lambda x, y: torch.stack((x, y, x)).exp(),
        lambda x, y: torch.stack((x, y)).exp(),
        (X, Y),
        0,
    ),
    "a part of a sum": (
        lambda x, y, z: (x + y.tanh() + z + 1.5) * 2, lambda x, y: x + y.tanh(), (X, Y, X.exp()), 1
    ),
    "a part of a sum over rows": (
        lambda x, y, z: ((x + y.tanh()).reshape(24) + z.reshape(24)).sin(),
        lambda x, y: x + y.tanh(),
        (X, Y, X.exp()),
        1,
    ),
    "a part of what is read": (
        lambda x, b: F.gelu((2 * x)[:, 2:6] + b[:4]), lambda x, b: F.gelu(x + b), (X, B), 1
    ),
    "nothing contracted": (
        lambda x, y, b: F.gelu(x[:, :0] @ y[:0] + b), lambda x, w, b: F.gelu(x @ w + b), (X, Y, B), 1
    ),
    "nothing": (lambda x: (x + 1).exp().sum(), lambda x: (x + 1).exp(), (X[:0],), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_found_or_not(name: str) -> None:
    program, pattern, args, count = CASES[name]
    assert len(find(program, pattern)(*args)) == count
    slope = grad(lambda *args: sum(v.sin().sum() for v in leaves(program(*args))))
    if not count:
        with pytest.raises(NoMatch):
            fuse(program, pattern)(*args)
        return
    assert fuse(program, pattern).lower(*args).kernels
    torch.testing.assert_close(fuse(program, pattern)(*args), program(*args))
    torch.testing.assert_close(fuse(slope, pattern)(*args), slope(*args))


# Arithmetic is known of floats alone: integers overflow, and complex numbers have another modulus.
OF_OTHER_DTYPES: dict[str, tuple[Callable[..., Any], Any, Tensor]] = {
    "squares of complex numbers": (
        lambda z: torch.square(z).abs(), lambda x: torch.square(x).abs(), torch.complex(X, Y)
    ),
    "squares of integers": (
        lambda i: torch.square(i).tanh(), lambda x: torch.square(x).tanh(), I * 2**33
    ),
    "biased products of integers": (
        lambda i: torch.addmm(i, i, i).tanh(),
        Pattern(lambda b, x, w: torch.addmm(b, x, w).tanh(), "m n, m k, k n -> m n"),
        I,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHER_DTYPES)
def test_arithmetic_of_other_dtypes_is_left_as_it_is(name: str) -> None:
    program, pattern, value = OF_OTHER_DTYPES[name]
    assert not find(program, pattern)(value)
    have = fuse(lambda x, v: (F.gelu(x + B), program(v)))(X, value)
    torch.testing.assert_close(have, (F.gelu(X + B), program(value)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [X[0, :3], I.double()])
def test_a_biased_product_of_a_value_and_itself(bias: Tensor) -> None:
    x = I.double().sin()
    for fn in (lambda b, x: F.gelu(torch.addmm(b, x, x)), lambda b, x: torch.addmm(x, x, x) + b):
        torch.testing.assert_close(fuse(fn)(bias, x), fn(bias, x))
    (found,) = find(fn_of_bias, lambda x, w, b: F.gelu(x @ w + b))(bias, x)
    assert found.nodes == ("addmm", "gelu")


def fn_of_bias(b: Tensor, x: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, x, x))


def test_a_kernel_of_indices_has_no_gradient() -> None:
    def largest(x: Tensor) -> Tensor:
        return (x.sin() + 1).argmax(-1)

    def loss(x: Tensor) -> Tensor:
        return (largest(x) * x.cos().sum(-1)).sum()

    kernel = Kernel("largest", (largest,), "... d -> ... | whole d")
    assert kernel.gradient is None
    run = fuse(grad(loss), kernel)
    assert [use.kernel for use in run.lower(X).kernels] == ["largest"]
    torch.testing.assert_close(run(X), grad(loss)(X))


def test_a_pattern_that_closes_over_a_tensor() -> None:
    def weighed(x: Tensor) -> Tensor:
        return torch.tanh(x * SCALE)

    def made(x: Tensor) -> Tensor:
        return torch.tanh(x * torch.tensor([1.0, 2.0]).sum())

    for pattern in (weighed, made):
        with pytest.raises(PatternError, match=r"reads a tensor that is not an argument .* a parameter"):
            find(lambda x: weighed(x) + 1, Pattern(pattern, "... d -> ... d"))(X)


def test_a_gradient_that_has_another_form_if_it_is_differentiated_again() -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(x, 2, w, b, 1e-5)

    x = X.reshape(1, 4, 6) + X.reshape(1, 4, 6).sin().flip(-1)
    args = torch.cat([x, 2 * x.cos()]), X[0, :4].exp(), B[:4]
    loss = lambda *args: norm(*args).sin().sum()  # noqa: E731
    slopes = grad(loss, argnums=(0, 1, 2))
    assert find(slopes, norm)(*args)[0].name == "norm"
    torch.testing.assert_close(fuse(slopes, norm)(*args), slopes(*args))


def test_a_program_that_has_nothing_of_a_pattern() -> None:
    with pytest.raises(NoMatch, match="no match in it: its last operation does not occur"):
        fuse(lambda x: x.cumsum(0), lambda x: F.gelu(x))(X)
    with pytest.raises(PatternError, match=r"gelu has no signature .* as in lambda x: gelu\(x\)"):
        fuse(lambda x: x.cumsum(0), F.gelu)


def test_outside_of_a_pattern() -> None:
    activation = any_of(torch.relu, torch.tanh)
    assert torch.equal(activation(X), X.relu())
    with pytest.raises(PatternError, match=r"call\(predicate\) can only be called inside a pattern"):
        anything(X)
