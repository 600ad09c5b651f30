"""What fuse says when it cannot do what it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor
from torch.func import grad

from torchard import (
    Kernel,
    KernelError,
    Mesh,
    NoMatch,
    P,
    Pattern,
    PatternError,
    register_kernel,
    scope,
    shard,
)

X, B = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 4)


def biased_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def model(x: Tensor, b: Tensor) -> Tensor:
    with scope("mlp"):
        return F.gelu(x + b)


def test_a_pattern_that_is_nowhere() -> None:
    def near(x: Tensor, b: Tensor) -> Tensor:
        with scope("mlp"):
            return torch.tanh(x) + F.gelu(x * b)

    with pytest.raises(NoMatch) as error:
        fuse(near, biased_gelu)(X, B)
    said = str(error.value)
    assert "fuse(near, biased_gelu): the pattern has no match in it: the nearest miss is" in said
    # Where it came nearest, and what is there instead of what.
    assert "test_fuse_errors.py" in said and "scope mlp" in said
    assert "product where the pattern has sum" in said
    assert "find(fn, pattern)" in said
    with pytest.raises(NoMatch, match="its last operation does not occur"):
        fuse(lambda x: x.sort().values, lambda x: torch.tanh(x))(X)
    # Also where it is asked for inside, and again at shapes at which it is not there.
    with pytest.raises(NoMatch):
        fuse(lambda x, b: fuse(near, biased_gelu)(x, b) * 2)(X, B)


def test_where_is_nowhere() -> None:
    with pytest.raises(NoMatch, match=r"where=\('block/\*',\)\) matches no scope.*'mlp'"):
        fuse(model, where="block/*")(X, B)
    with pytest.raises(NoMatch, match="it occurs, but it is outside the scopes that are fused"):

        def two(x: Tensor, b: Tensor) -> Tensor:
            with scope("other"):
                x = x * 2
            return model(x, b)

        fuse(two, biased_gelu, where="other")(X, B)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x, b: F.gelu(x + b).double(), r"returned float64\[3, 4\] .* returns float32\[3, 4\]"),
        (lambda x, b: F.gelu(x + b)[:2], r"returned float32\[2, 4\] for float32\[3, 4\], float32\[4\]"),
        (lambda x, b: (x, b), r"returned float32\[3, 4\], float32\[4\] for"),
        (lambda x, b: None, "returned NoneType"),
        (lambda x, b: [F.gelu(x + b)], "returned list"),
    ],
    ids=["dtype", "shape", "number", "none", "list"],
)
def test_a_kernel_that_returns_something_else(wrong: Any, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        fuse(model, biased_gelu, wrong)(X, B)


def test_an_implementation_that_cannot_be_called() -> None:
    with pytest.raises(TypeError) as error:
        fuse(model, Kernel("mine", (biased_gelu,), "... d, d -> ... d", {"any": F.gelu}))(X, B)
    assert error.value.__notes__[0] == "in an implementation of the kernel 'mine'"
    with pytest.raises(KernelError, match="'mine' has an implementation for 'gpu', which is no device"):
        Kernel("mine", (biased_gelu,), "... d, d -> ... d", {"gpu": F.gelu})


def test_a_kernel_without_a_derivative() -> None:
    def mine(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b)

    run = fuse(model, biased_gelu, mine)
    torch.testing.assert_close(run(X, B), model(X, B))
    said = r"kernel 'biased_gelu' has no vjp, and model takes a gradient through it \(.*test_fuse_errors"
    with pytest.raises(KernelError, match=said):
        grad(lambda x: run(x, B).sum())(X)
    with pytest.raises(KernelError, match="has no vjp"):
        fuse(grad(lambda x, b: model(x, b).sin().sum()), biased_gelu, mine)(X, B)
    with pytest.raises(KernelError, match="has no vjp"):
        run(X.clone().requires_grad_(), B)
    # With its reference's, or with one of its own.
    for vjp in ("reference", {"any": by_hand}):
        kernel = Kernel("mine", (biased_gelu,), "... d, d -> ... d", {"any": mine}, vjp)
        have = grad(lambda x, kernel=kernel: fuse(model, kernel)(x, B).sin().sum())(X)
        torch.testing.assert_close(have, grad(lambda x: model(x, B).sin().sum())(X))


def by_hand(x: Tensor, b: Tensor, ct: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gelu(x + b)."""
    h = (x + b).requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(F.gelu(h), h, ct)
    return found, found.sum(0)


def test_compilers_and_patterns() -> None:
    with pytest.raises(KernelError, match=r"compiler='nvcc'\): the compilers are inductor, eager"):
        fuse(model, compiler="nvcc")
    with pytest.raises(PatternError, match="has no tensor among its parameters"):
        fuse(model, lambda: torch.ones(3))
    with pytest.raises(PatternError, match="not of the form"):
        Pattern(biased_gelu, "... d -> ... d")
    with pytest.raises(PatternError, match=r"cannot be traced: .* State how its dims correspond"):
        fuse(model, lambda x: x.no_such_thing())(X, B)
    with pytest.raises(KernelError, match="a kernel named 'bias_gelu' is already registered"):
        register_kernel(Kernel("bias_gelu", (biased_gelu,)))


@pytest.mark.parametrize("dims", ["b d, d -> b", "b d, d -> d b", "b d, d -> b d, d"])
def test_dims_that_do_not_fit_a_reference(dims: str) -> None:
    kernel = Kernel("k", (lambda x, s: x * s,), dims)
    wanted = r"do not fit the pattern k: for inputs of shapes \[6, 10\], \[10\] it returns \[6, 10\]\."
    with pytest.raises(PatternError, match=wanted):
        fuse(lambda x, s: x * s, kernel)(torch.ones(2, 4), torch.ones(4))


def test_dims_that_say_too_much_split_nothing() -> None:
    """A kernel that forgets what must be whole comes apart where it is split, and is right."""

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return x / x.exp().sum(-1, keepdim=True) * w

    kernel = Kernel("scaled", (scaled,), "... d, d -> ... d")
    mesh = Mesh({"tp": 2}, virtual=True)
    for spec, how in ((P(None, "tp"), "decomposed"), (P("tp"), "eager")):
        run = shard(fuse(scaled, kernel), mesh, in_specs=(spec, P()))
        torch.testing.assert_close(run(X, B).full(), scaled(X, B))
        (use,) = run.lower(X, B).kernels
        assert use.how.startswith(how)
