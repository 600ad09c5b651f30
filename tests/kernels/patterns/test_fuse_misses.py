"""What nearly is a kernel is said, with the reason; what is nothing like one is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor

from torchard import Mesh, P, checkpoint, jit, scope, shard
from torchard.kernels.rewriting import near_misses as near

X, Y, W, B = (
    torch.linspace(-1, 1, 192).reshape(4, 6, 8),
    torch.linspace(0, 1, 192).reshape(4, 6, 8),
    torch.linspace(1, 2, 8),
    torch.linspace(-1, 0, 8),
)
Q = torch.linspace(-1, 1, 144).reshape(2, 3, 6, 4)


def layer_norm_over(dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with scope("norm"):
            centred = x - x.mean(dim, keepdim=True)
            deviation = (x.var(dim, keepdim=True, correction=0) + 1e-5).sqrt()
            return centred / deviation * w + b

    return fn


def gelu_of_two(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """x + b, and inside the error function y + b."""
    return 0.5 * (x + b) * (1 + torch.erf((y + b) / math.sqrt(2)))


def rms_norm_with_eps_outside(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w


def attention_scaled_by(scale: float) -> Callable[..., Tensor]:
    return lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v


def gelu_read_before(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + b
    return h, F.gelu(h)


# What is written, of what, which kernel it nearly is, and why it is not.
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, str]] = {
    "another axis": (
        layer_norm_over(1),
        (X, W, B),
        "layer_norm",
        r"sum over dims of \[6\] .* \[8\]",
    ),
    "another edge": (gelu_of_two, (X, Y, B), "bias_gelu", "values differ|sum of"),
    "eps elsewhere": (rms_norm_with_eps_outside, (X, W), "rms_norm", "product where .* has sum"),
    "another scale": (
        attention_scaled_by(0.3),
        (Q, Q, Q),
        "attention",
        r"a factor of 0\.3 where the pattern has 0\.5 \(13 of its 13 operations match\)",
    ),
    "no scale": (
        attention_scaled_by(1),
        (Q, Q, Q),
        "attention",
        "dot where the pattern has a multiple",
    ),
    "another mask": (
        lambda q, k, v: (
            torch.softmax(
                (q @ k.mT * 0.5).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9), -1
            )
            @ v
        ),
        (Q, Q, Q),
        "attention_causal",
        "-1000000000 where the pattern has -inf",
    ),
    "a mask of the past": (
        lambda q, k, v: (
            torch.softmax(
                (q @ k.mT * 0.5).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(0), -math.inf),
                -1,
            )
            @ v
        ),
        (Q, Q, Q),
        "attention_causal",
        "triu by .* where the pattern's is by 1 ",
    ),
    "another slope": (
        lambda g, u: g * torch.sigmoid(2 * g) * u,
        (X, Y),
        "swiglu",
        "a factor of -2 where the pattern has -1",
    ),
    "without a weight": (
        lambda x: F.rms_norm(x, (8,), eps=1e-6),
        (X,),
        "rms_norm",
        "product of 2 values where the pattern's is of 3",
    ),
    "something between": (
        lambda q, k, v: torch.softmax((q @ k.mT * 0.5).tanh(), -1) @ v,
        (Q, Q, Q),
        "attention",
        "tanh where the pattern has dot",
    ),
    "broadcast": (lambda g, u: F.silu(g) * u, (X, B), "swiglu", "its dims do not correspond"),
    "more bytes": (
        gelu_read_before,
        (X, B),
        "bias_gelu",
        r"it would move [\d,]+ bytes instead of [\d,]+: a value inside is read elsewhere, "
        r"test_fuse_misses\.py:\d+ in gelu_read_before",
    ),
}

NOTHING: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "arithmetic": (lambda x, y: (x * y + 2 * x) / (y + 3), (X, Y)),
    "products": (lambda x: torch.tanh(x @ x.mT) @ x, (X,)),
    "a sum of squares": (lambda x: x.pow(2).sum(-1).sqrt(), (X,)),
    "functions": (lambda x: torch.exp(x).sin() + torch.erf(x), (X,)),
    "activations": (lambda x, y: F.silu(x) + F.gelu(y), (X, Y)),
    "a kernel": (lambda x, b: F.gelu(x + b), (X, B)),
    "one that is one operation": (lambda x: torch.softmax(x, -1), (X,)),
    "a kernel in a larger one": (
        lambda x, y, w: (x + y, F.rms_norm(x + y, (8,), w, 1e-6)),
        (X, Y, W),
    ),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (Q, Q, Q)),
}


def biased_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def missed(fn: Callable[..., Any], args: tuple[Tensor, ...], **kwargs: Any) -> list[Any]:
    return list(fuse(fn, compiler="eager", **kwargs).lower(*args).kernels.missed)


@pytest.mark.parametrize("case", CASES)
def test_a_near_miss_says_why(case: str) -> None:
    fn, args, kernel, why = CASES[case]
    (one,) = missed(fn, args)
    assert one.kernel == kernel
    assert re.match(why, one.why), one.why
    assert one.source.startswith("test_fuse_misses.py:") and one.phase == "forward"
    assert one.scope == ("norm" if case == "another axis" else "")
    printed = str(fuse(fn, compiler="eager").lower(*args).kernels)
    assert one.why in printed and one.source in printed


@pytest.mark.parametrize("case", NOTHING)
def test_what_is_not_like_a_kernel_is_not_listed(case: str) -> None:
    fn, args = NOTHING[case]
    assert missed(fn, args) == []
    assert "near miss" not in str(fuse(fn, compiler="eager").lower(*args).kernels)


def test_what_was_not_asked_for() -> None:
    def two(x: Tensor, b: Tensor) -> Tensor:
        with scope("first"):
            x = F.gelu(x + b)
        with scope("second"):
            return F.gelu(x + b)

    (one,) = missed(two, (X, B), where="second")
    assert (one.kernel, one.scope) == ("bias_gelu", "first")
    assert one.why == "it is outside the scopes that are fused"
    # Of patterns that were asked for, those alone.
    assert (
        missed(lambda x, b: two(layer_norm_over(1)(x, W, W), b), (X, B), pattern=biased_gelu) == []
    )


def test_the_backward() -> None:
    """There the gradients of kernels in use are looked for, not kernels of the forward."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (F.silu(x) * y.relu() + x * y).sin().sum()

    def without_weight(x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), eps=1e-6).sin().sum()

    assert missed(torch.func.grad(loss, (0, 1)), (X, Y)) == []
    (one,) = missed(torch.func.grad(without_weight), (X,))
    assert (one.kernel, one.phase) == ("rms_norm", "forward")


def test_a_table_is_short() -> None:
    def many(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        norms = [layer_norm_over(1)(x * i, w, b) for i in range(2, 5)]
        scaled = [x * torch.sigmoid(i * x) * x.cos() for i in range(2, 18)]
        return [*norms, *scaled]

    found = fuse(many, compiler="eager").lower(X, W, B).kernels
    assert len(found.missed) == 19
    rows = str(found).splitlines()
    (norms,) = [row for row in rows if row.startswith("layer_norm")]
    assert norms.split()[2:6] == ["norm", norms.split()[3], "in", "fn"] and " 3 " in norms
    assert rows[-1] == "and 5 more: .kernels.missed" and len(rows) == 2 + 1 + 12 + 1


def test_fusing_does_not_look_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(program: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(near, "Reading", failing)
    run = fuse(layer_norm_over(1), compiler="eager")
    torch.testing.assert_close(run(X, W, B), layer_norm_over(1)(X, W, B))
    assert list(run.lower(X, W, B).kernels) == []


@pytest.mark.parametrize(
    "stack",
    [
        lambda fn: fuse(shard(fn, Mesh({"dp": 2}, virtual=True), in_specs=(P("dp"), P(), P()))),
        lambda fn: shard(fuse(fn), Mesh({"dp": 2}, virtual=True), in_specs=(P("dp"), P(), P())),
        lambda fn: jit(fuse(fn), backend="eager"),
        lambda fn: fuse(jit(fn, backend="eager")),
        lambda fn: fuse(checkpoint(fn)),
        lambda fn: lambda_of(fuse(fn)),
    ],
    ids=["fuse∘shard", "shard∘fuse", "jit∘fuse", "fuse∘jit", "fuse∘checkpoint", "inside"],
)
def test_in_stacks(stack: Callable[..., Any]) -> None:
    lowered = stack(layer_norm_over(1)).lower(X, W, B)
    assert [one.kernel for one in lowered.kernels.missed] == ["layer_norm"]


def lambda_of(fn: Callable[..., Any]) -> Any:
    """A call of something fused inside of a traced function."""
    return jit(lambda *args: fn(*args) * 1, backend="eager")
