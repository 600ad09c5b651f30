"""Patterns are found however they are written, and nothing else is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor
from torch.func import grad, vmap

from torchard import Mesh, P, Pattern, find, random, shard
from torchard.kernels.library.bias_activation import bias_gelu
from torchard.kernels.library.norms import layer_norm, rms_norm

KEYS = iter(random.split(random.key(23), 32))


def draw(*shape: int) -> Tensor:
    return random.normal(next(KEYS), shape)


ROWS, D, H = 6, 8, 10
X, X3, W, B, V = draw(ROWS, D), draw(2, 3, D), draw(D, H), draw(H), draw(H, D)
G = draw(D)


def head(y: Tensor) -> Tensor:
    """Something behind, so that no cotangent is a constant."""
    return torch.sin(y).sum()


# Of x, w, b: gelu(x w + b), written in many ways.
GELU: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "product, then bias": lambda x, w, b: F.gelu(x @ w + b),
    "bias first": lambda x, w, b: F.gelu(b + x @ w),
    "linear": lambda x, w, b: F.gelu(F.linear(x, w.t(), b)),
    "addmm": lambda x, w, b: F.gelu(torch.addmm(b, x.reshape(-1, D), w)),
    "einsum": lambda x, w, b: F.gelu(torch.einsum("...k,kn->...n", x, w) + b),
    "views between": lambda x, w, b: F.gelu((x.reshape(-1, D) @ w + b).reshape(2, -1, H)),
    "expanded bias": lambda x, w, b: F.gelu(x @ w + b.expand(*x.shape[:-1], H)),
    "a row of bias": lambda x, w, b: F.gelu(x @ w + b[None]),
    "minus minus": lambda x, w, b: F.gelu(x @ w - (-b)),
    "written out": lambda x, w, b: (h := x @ w + b) * 0.5 * (1 + torch.erf(h / math.sqrt(2))),
    "written out, divided": lambda x, w, b: ((h := b + x @ w) * (1 + torch.erf(h * 0.5**0.5))) / 2,
    "pre-activation returned": lambda x, w, b: ((h := x @ w + b), F.gelu(h)),
    "pre-activation used": lambda x, w, b: (h := F.linear(x, w.t(), b)) + F.gelu(h),
    "a bias of equal rows": lambda x, w, b: F.gelu(
        x @ w + (2 * ((w[:, :1] + b) - w[:, :1])).sum(0) / (2 * D)
    ),
    "in place": lambda x, w, b: F.gelu((x @ w).add_(b)),
    "transposed result": lambda x, w, b: F.gelu(x @ w + b).transpose(-1, -2),
}

NOT_GELU: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "other axis": lambda x, w, b: F.gelu((x @ w).reshape(H, -1) + b[:, None]),
    "broken edge": lambda x, w, b: ((x @ w + b), F.gelu(x @ w)),
    "bias behind": lambda x, w, b: F.gelu(x @ w) + b,
    "other activation": lambda x, w, b: F.gelu(x @ w + b, approximate="tanh"),
    "another sum": lambda x, w, b: (h := x @ w + b) * 0.5 * (1 + torch.erf((h + b) / math.sqrt(2))),
    "another number": lambda x, w, b: (h := x @ w + b) * 0.5 * (1 + torch.erf(h / 1.414)),
    "a number for a bias": lambda x, w, b: F.gelu(x @ w + 1.5),
    "broadcast of a scalar": lambda x, w, b: F.gelu(x @ w + b.sum()),
    "broadcast over rows": lambda x, w, b: F.gelu((x @ w) + (x @ w)[..., :1]),
    "another broadcast": lambda x, w, b: F.gelu((x @ w)[..., None] + b),
}


def found(fn: Callable[..., Any], kernel: Any, *args: Tensor) -> Counter[str]:
    return Counter(match.name for match in find(fn, kernel)(*args))


@pytest.mark.parametrize("name", GELU)
@pytest.mark.parametrize("x", [X, X3], ids=["2-D", "3-D"])
def test_every_spelling(name: str, x: Tensor) -> None:
    fn = GELU[name]
    assert found(fn, bias_gelu, x, W, B) == {"bias_gelu": 1}
    run = fuse(fn, bias_gelu)
    assert [use.kernel for use in run.lower(x, W, B).kernels] == ["bias_gelu"]
    torch.testing.assert_close(run(x, W, B), fn(x, W, B))


@pytest.mark.parametrize("name", NOT_GELU)
def test_near_misses(name: str) -> None:
    assert found(NOT_GELU[name], bias_gelu, X, W, B) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_in_other_dtypes(dtype: torch.dtype) -> None:
    args = [t.to(dtype) for t in (X3, W, B)]
    fn = GELU["linear"]
    assert found(fn, bias_gelu, *args) == {"bias_gelu": 1}
    # In float32 and back: what torch does by itself to narrow types, and another function of wide ones.
    cast = found(lambda x, w, b: F.gelu((x @ w + b).float()).to(dtype), bias_gelu, *args)
    assert cast == ({} if dtype == torch.float64 else {"bias_gelu": 1})


def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return head(F.gelu(F.linear(x, w.t(), b)) @ V)


def residual(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The gradient of x is a sum, of which the kernel's is a part."""
    return head(x + F.gelu(x + b[:D]))


def residual_before(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """What is biased goes on itself."""
    h = torch.cos(x) @ w
    return head((F.gelu(h + b) @ V) + (h * h) @ V)


BOTH = {"bias_gelu": 1, "bias_gelu_backward": 1}
CONTEXTS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "all gradients": (grad(loss, (0, 1, 2)), BOTH),
    "of the bias alone": (grad(loss, 2), BOTH),
    "through a residual": (grad(residual, (0, 2)), BOTH),
    "through a residual before": (grad(residual_before, (0, 1, 2)), BOTH),
    "the value too": (lambda *a: torch.func.grad_and_value(loss, (0, 1, 2))(*a), BOTH),
    "vmap": (
        vmap(lambda x, w, b: F.gelu(F.linear(x, w.t(), b)), (0, None, None)),
        {"bias_gelu": 1},
    ),
    "vmap of grad": (vmap(grad(loss, 0), (0, None, None)), BOTH),
    "grad of vmap": (
        grad(lambda w, x, b: vmap(loss, (0, None, None))(x, w, b).sum()),
        BOTH,
    ),
    "a sum alone": (grad(lambda x, w, b: F.gelu(x @ w + b).sum(), (1, 2)), BOTH),
    "a mean alone": (grad(lambda x, w, b: F.gelu(x @ w + b).mean(), (1, 2)), BOTH),
    "twice": (
        lambda x, w, b: F.gelu(F.gelu(x @ w + b) @ w[:, :D].t() @ w + b),
        {"bias_gelu": 2},
    ),
}

# Nobody reads the forward's result there, so what would make it is not run.
UNREAD = ("a sum alone", "a mean alone")


@pytest.mark.parametrize("name", CONTEXTS)
def test_inside_of_transforms(name: str) -> None:
    fn, counts = CONTEXTS[name]
    args = (W, X3, B) if name == "grad of vmap" else (X3, W, B)
    if name == "twice":
        args = (X3, draw(D, D), draw(D))
        fn = lambda x, w, b: F.gelu(F.gelu(x @ w + b) @ w + b)  # noqa: E731
    assert found(fn, bias_gelu, *args) == counts
    run = fuse(fn, bias_gelu)
    left = {"bias_gelu_backward": 1} if name in UNREAD else counts
    assert Counter(map(str, run.lower(*args).kernels)) == left
    torch.testing.assert_close(run(*args), fn(*args))


def test_joint_programs() -> None:
    run = fuse(loss)
    joint = run.lower_joint(X3, W, B)
    assert Counter(map(str, joint.kernels)) == BOTH
    torch.testing.assert_close(grad(run, (0, 1, 2))(X3, W, B), grad(loss, (0, 1, 2))(X3, W, B))


@pytest.mark.parametrize("order", ["fuse∘shard", "shard∘fuse"])
@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp"), P()], ids=["columns", "rows", "whole"])
def test_after_shard(order: str, spec: P) -> None:
    mesh = Mesh({"tp": 2}, virtual=True)
    fn = grad(loss, (1, 2))
    specs = (P(), spec, P("tp") if spec == P(None, "tp") else P())
    run = (
        fuse(shard(fn, mesh, specs), bias_gelu)
        if order == "fuse∘shard"
        else shard(fuse(fn, bias_gelu), mesh, specs)
    )
    assert Counter(map(str, run.lower(X3, W, B).kernels)) == BOTH
    for have, want in zip(run(X3, W, B), fn(X3, W, B), strict=True):
        torch.testing.assert_close(have if isinstance(have, Tensor) else have.full(), want)


EPS = 1e-5
RMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": lambda x, w: F.rms_norm(x, (D,), w, EPS),
    "by hand": lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w,
    "commuted": lambda x, w: w * (torch.rsqrt(EPS + (x**2).mean(-1, keepdim=True)) * x),
    "divided": lambda x, w: w * x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / D + EPS),
    "norm": lambda x, w: x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w,
    "HuggingFace": lambda x, w: hugging_face(x, w),
    "in other dims": lambda x, w: F.rms_norm(x.reshape(-1, D), (D,), w, EPS).reshape(x.shape),
}


def hugging_face(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return w * h.to(x.dtype)


NOT_RMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "other axis": lambda x, w: x * torch.rsqrt((x * x).mean(0, keepdim=True) + EPS) * w,
    "eps outside": lambda x, w: x / (torch.sqrt((x * x).mean(-1, keepdim=True)) + EPS) * w,
    "eps added behind": lambda x, w: x * (torch.rsqrt((x * x).mean(-1, keepdim=True)) + EPS) * w,
    "a cube": lambda x, w: x * torch.rsqrt((x**3).mean(-1, keepdim=True) + EPS) * w,
    "another mean": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / 7 + EPS) * w,
    "of another value": lambda x, w: (
        x * torch.rsqrt((x.sin() ** 2).mean(-1, keepdim=True) + EPS) * w
    ),
    "weight inside": lambda x, w: x * torch.rsqrt((x * x * w).mean(-1, keepdim=True) + EPS) * w,
    "without weight": lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rms_norm(name: str, dtype: torch.dtype) -> None:
    fn, x, g = RMS[name], X3.to(dtype), G.to(dtype)
    if dtype == torch.bfloat16 and name not in ("torch", "HuggingFace", "in other dims"):
        return  # without the upcast it is another function in bf16
    (match,) = find(fn, rms_norm)(x, g)
    assert dict(match.literals)["eps"] == pytest.approx(EPS)
    torch.testing.assert_close(fuse(fn, rms_norm)(x, g), fn(x, g))
    both = grad(lambda x, g: head(x + fn(x, g)), (0, 1))
    assert found(both, rms_norm, x, g) == {"rms_norm": 1, "rms_norm_backward": 1}
    torch.testing.assert_close(fuse(both, rms_norm)(x, g), both(x, g))


@pytest.mark.parametrize("name", NOT_RMS)
def test_near_rms_norms(name: str) -> None:
    assert found(NOT_RMS[name], rms_norm, X, G) == {}


def test_layer_norms() -> None:
    def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + EPS) * w + b

    def by_var(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return b + w * ((x - mean) * (var + EPS).rsqrt())

    def unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
        return b + w * ((x - mean) * (var + EPS).rsqrt())

    bias = draw(D)
    for fn in (lambda x, w, b: F.layer_norm(x, (D,), w, b, EPS), by_hand, by_var):
        assert found(fn, layer_norm, X3, G, bias) == {"layer_norm": 1}
        torch.testing.assert_close(fuse(fn, layer_norm)(X3, G, bias), fn(X3, G, bias))
    assert found(unbiased, layer_norm, X3, G, bias) == {}


def test_a_run_of_layers(capfd: pytest.CaptureFixture[str]) -> None:
    """Over two dims, whose joined loops come apart; shapes tried in vain are nobody's business."""

    def run(x: Tensor, w1: Tensor, b1: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.layer_norm(F.linear(x, w1, b1), b.shape, w, b))

    args = X, draw(H, D), B, draw(ROWS, H), draw(ROWS, H)
    for pattern in (run, Pattern(run, "m i, d i, d, m d, m d -> m d")):
        assert found(lambda *args: run(*args).sin(), pattern, *args) == {"run": 1}
        turned = lambda x, *rest: run(x.sin(), *rest).t()  # noqa: E731
        torch.testing.assert_close(fuse(turned, pattern)(*args), turned(*args))
    assert found(run, run, *args[:3], draw(H), draw(H)) == {"run": 1}
    assert not capfd.readouterr().err


def test_a_gradient_that_is_the_cotangent() -> None:
    """Of a norm over everything: each row has a bias of its own, and nothing is summed over."""

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, b.shape, w, b)

    slopes = grad(lambda *args: head(norm(*args)), argnums=(0, 1, 2))
    args = X, draw(ROWS, D), draw(ROWS, D)
    run = fuse(slopes, Pattern(norm, "m d, m d, m d -> m d | whole m d"))
    assert [use.kernel for use in run.lower(*args).kernels] == ["norm", "norm_backward"]
    assert not any("native" in str(node.target) for node in run.lower(*args).calls)
    torch.testing.assert_close(run(*args), slopes(*args))


def test_kernels_of_one_name_have_rules_of_their_own() -> None:
    """Two lambdas, of which only one comes apart along a dim."""
    placed, mesh = draw(4, 8), Mesh({"tp": 2}, virtual=True)
    for pattern, dims in (
        (lambda x: torch.tanh(x).sin(), "... d -> ... d"),
        (lambda x: torch.softmax(torch.tanh(x), -1), "... d -> ... d | whole d"),
    ):
        fn = lambda x, of=pattern: of(x) + x  # noqa: E731
        run = shard(fuse(fn, Pattern(pattern, dims)), mesh, P(None, "tp"))
        torch.testing.assert_close(run(placed).full(), fn(placed))


def test_other_operations_keep_theirs() -> None:
    """What is not fused is not touched: a biased product stays one."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(torch.cos(F.linear(x, w.t(), b)) @ V, w.t(), b))

    targets = [str(node.target) for node in fuse(fn).lower(X3, W, B).calls]
    assert targets.count("aten.addmm.default") == 1 and targets.count("aten.cos.default") == 1


def test_patterns_of_any_shape() -> None:
    """A diamond, a tree, several outputs, alternatives, any operation, numbers."""
    from torchard.kernels import any_of, call

    def diamond(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return torch.sin(y) * torch.cos(y)

    def tree(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.atan2(a.exp(), b.exp()) + c.exp()

    def several(x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return x @ u, x @ v

    activated = any_of(torch.tanh, torch.sigmoid)
    a, b, c = draw(4, 5), draw(4, 5), draw(5)
    assert len(find(lambda x: diamond(x * 2), diamond)(a)) == 1
    assert len(find(lambda x: torch.sin(torch.tanh(x)) * torch.cos(x), diamond)(a)) == 0
    assert len(find(lambda a, b, c: tree(b, a, c), tree)(a, b, c)) == 1
    assert len(find(lambda x, u: (x @ u, x @ (u + 1), x @ (u * 3)), several)(a, draw(5, 3))) == 1
    for fn, count in ((torch.tanh, 1), (torch.sigmoid, 1), (torch.cos, 0)):
        assert len(find(lambda x, fn=fn: fn(x) + 1, lambda x: activated(x) + 1)(a)) == count
    fuzzy = call(lambda name: name in ("sin", "cos"))
    for fn, count in ((torch.sin, 1), (torch.cos, 1), (torch.tan, 0)):
        program: Any = lambda x, fn=fn: fn(x * 2).exp()  # noqa: E731
        pattern: Any = lambda x: fuzzy(x).exp()  # noqa: E731
        assert len(find(program, pattern)(a)) == count
        if count:
            torch.testing.assert_close(fuse(program, pattern)(a), program(a))

    def scaled(x: Tensor, factor: Any = ...) -> Tensor:
        return torch.tanh(x + factor)

    (match,) = find(lambda x: torch.tanh(0.25 + x), scaled)(a)
    assert match.literals == (("factor", 0.25),)
    fixed = Pattern(lambda x, factor=0.5: torch.tanh(x + factor))
    assert find(lambda x: torch.tanh(0.25 + x), fixed)(a) == []
    assert len(find(lambda x: torch.tanh(0.5 + x), fixed)(a)) == 1


def test_pointwise_operations_of_two_results() -> None:
    def parts(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return F.gelu(mantissa) + exponent

    torch.testing.assert_close(fuse(parts)(X), parts(X))
