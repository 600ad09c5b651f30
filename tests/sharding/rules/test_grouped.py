"""Products of groups of rows with a matrix for each group, as experts compute them.

References are torch's own, eagerly, on one device. Values are small integers, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole
from torch.func import grad, jvp, vmap

from torchard import Mesh, P, jit, shard, trace
from torchard.functional.costs.flops import flops
from torchard.functional.effects.grouped_products import (
    GROUPED_MM,
    GROUPED_OUTER,
    by_kernel,
    outer_by_kernel,
)

S, K, N, E = 24, 8, 16, 4
ENDS = torch.tensor([5, 5, 13, S], dtype=torch.int32)  # the second expert has no row
SHORT = torch.tensor([5, 5, 13, 20], dtype=torch.int32)  # the last rows have no expert
GENERATOR = torch.Generator().manual_seed(0)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=GENERATOR).to(dtype)


X, W, COTANGENT = integers(S, K), integers(E, K, N), integers(S, N)
SIZES = [2, 3, 4]
Fn = Callable[..., Any]


def product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, w, offs=ends)


def slope(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, c: torch.Tensor) -> Any:
    return grad(lambda x, w: (product(x, w, ends) * c).sum(), (0, 1))(x, w)


def by_hand(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Row by row; rows of no expert are zero."""
    expert = torch.searchsorted(ends, torch.arange(len(x), dtype=torch.int32), right=True)
    rows = [x[i] @ w[e] if e < len(w) else x.new_zeros(w.shape[2]) for i, e in enumerate(expert)]
    return torch.stack(rows)


# For each split: the specs of rows, matrices and results, and what forward and gradient send.
Sent = list[tuple[str, tuple[int, ...]]]
SPLITS: dict[str, tuple[P, P, P, Sent, Sent]] = {
    # Each rank has its own rows; the matrices' gradients are sums over rows.
    "rows": (P("a"), P(), P("a"), [], [("all_reduce", (E, K, N))]),
    # Contracted: the result is a sum; gradients are local.
    "features in": (P(None, "a"), P(None, "a"), P(), [("all_reduce", (S, N))], []),
    # The transpose of the one above.
    "features out": (P(), P(None, None, "a"), P(None, "a"), [], [("all_reduce", (S, K))]),
    # Each rank has the rows of its experts, and zeros: no matrix is sent.
    "experts": (P(), P("a"), P(), [("all_reduce", (S, N))], [("all_reduce", (S, K))]),
}


def sent(run: Any, *args: torch.Tensor) -> Sent:
    return [(c.kind, tuple(c.shape)) for c in run.lower(*args).collectives]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str, size: int) -> None:
    of_x, of_w, of_y, forward, backward = SPLITS[name]
    mesh = Mesh({"a": size}, virtual=True)
    run = shard(product, mesh, (of_x, of_w, P()), of_y)
    assert sent(run, X, W, ENDS) == forward
    assert torch.equal(whole(run(X, W, ENDS)), product(X, W, ENDS))
    run = shard(slope, mesh, (of_x, of_w, P(), of_y), (of_x, of_w))
    assert sent(run, X, W, ENDS, COTANGENT) == backward
    for have, want in zip(run(X, W, ENDS, COTANGENT), slope(X, W, ENDS, COTANGENT), strict=True):
        assert torch.equal(whole(have), want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SPLITS)
def test_the_work_is_split(name: str, size: int) -> None:
    """Of matrices, rows or features; of experts, as if all had as many rows."""
    of_x, of_w, of_y, *_ = SPLITS[name]
    mesh = Mesh({"a": size}, virtual=True)
    work = shard(product, mesh, (of_x, of_w, P()), of_y).lower(X, W, ENDS).work
    dim = {"rows": S, "features in": K, "features out": N, "experts": E}[name]
    assert work.flops == 2 * S * K * N + E  # with the begins of groups
    assert work.rank_flops == 2 * S * K * N * -(-dim // size) // dim + E


def test_rows_of_no_group_are_zero() -> None:
    """torch leaves them as memory was."""
    assert torch.equal(jit(product, backend="eager")(X, W, SHORT), by_hand(X, W, SHORT))
    mesh = Mesh({"a": 3}, virtual=True)
    for of_x, of_w, of_y, *_ in SPLITS.values():
        run = shard(product, mesh, (of_x, of_w, P()), of_y)
        assert torch.equal(whole(run(X, W, SHORT)), by_hand(X, W, SHORT))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_and_experts_over_two_axes(size: int) -> None:
    """Groups that begin before a rank's first row, or end after its last."""
    mesh = Mesh({"a": size, "b": 2}, virtual=True)
    run = shard(product, mesh, (P("a"), P("b"), P()), P("a"))
    assert torch.equal(whole(run(X, W, SHORT)), by_hand(X, W, SHORT))
    run = shard(slope, mesh, (P("a"), P("b"), P(), P("a")), (P("a"), P("b")))
    for have, want in zip(run(X, W, ENDS, COTANGENT), slope(X, W, ENDS, COTANGENT), strict=True):
        assert torch.equal(whole(have), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_every_dtype(dtype: torch.dtype, backend: str) -> None:
    x, w, c = X.to(dtype), W.to(dtype), COTANGENT.to(dtype)
    for fn, args in ((product, (x, w, ENDS)), (slope, (x, w, ENDS, c))):
        have, want = jit(fn, backend=backend)(*args), fn(*args)
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_every_form() -> None:
    """Columns in groups, rows of both in groups, and a matrix for each of as many others."""
    forms: list[tuple[Fn, tuple[torch.Tensor, ...]]] = [
        (lambda a, b: F.grouped_mm(a, b, offs=ENDS), (W.mT.contiguous(), X.t().contiguous())),
        (lambda a, b: F.grouped_mm(a.t(), b, offs=ENDS), (X, COTANGENT)),
        (F.grouped_mm, (W.mT.contiguous(), W)),
    ]
    for fn, args in forms:
        assert torch.equal(jit(fn, backend="eager")(*args), fn(*args))
        for node in trace(fn)(*args).calls:
            assert "_grouped_mm" not in str(node.target)


def test_what_torch_refuses_is_refused() -> None:
    for args in ((X, W.double(), ENDS), (X, W, ENDS.long()), (X, W[:3], ENDS), (X[:, 1:], W, ENDS)):
        with pytest.raises(RuntimeError):
            product(*args)
        with pytest.raises(Exception, match=r"grouped_mm|Expected|expected|size|match"):
            jit(product, backend="eager")(*args)


def test_derivatives_of_derivatives() -> None:
    """By torch.func, inside and outside of a transform, against products row by row."""

    def loss(f: Fn) -> Fn:
        return lambda x, w: (f(x, w, SHORT) ** 2).sum()

    def second(f: Fn) -> Fn:
        return grad(lambda x, w: (grad(loss(f), 1)(x, w) ** 2).sum(), (0, 1))

    want = second(by_hand)(X.double(), W.double())
    for run in (
        jit(second(product), backend="eager"),
        second(jit(product, backend="eager")),
        grad(lambda x, w: (jit(grad(loss(product), 1), backend="eager")(x, w) ** 2).sum(), (0, 1)),
    ):
        for have, each in zip(run(X, W), want, strict=True):
            torch.testing.assert_close(have.double(), each, rtol=1e-6, atol=0)


def test_forward_mode_and_vmap() -> None:
    def pushed(f: Fn) -> Fn:
        return lambda x, w: jvp(lambda x, w: f(x, w, SHORT), (x, w), (w[0, :, :1].t() + x, w + 1))

    have = jit(pushed(product), backend="eager")(X, W)
    torch.testing.assert_close(have, pushed(by_hand)(X, W), rtol=0, atol=0)
    several, ends = torch.stack([X, X + 1]), torch.stack([SHORT, ENDS])
    mapped = jit(vmap(product, (0, None, 0)), backend="eager")(several, W, ends)
    want = torch.stack([by_hand(X, W, SHORT), by_hand(X + 1, W, ENDS)])
    assert torch.equal(mapped, want)

    def losses(w: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda x, e: product(x, w, e).sum()))(several, ends)

    each = [grad(lambda x, e=e: by_hand(x, W, e).sum())(X) for e in ends]
    torch.testing.assert_close(jit(losses, backend="eager")(W), torch.stack(each))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("width", [8, 3])
def test_by_the_kernel_of_other_devices(width: int, first: int) -> None:
    """Of all groups or of those from the third on, and of rows that are not aligned in memory."""
    x, w, y = X[:, :width], W[first:, :width], COTANGENT[:, :width]
    ends = SHORT[first:]
    begins = F.pad(SHORT[:-1], (1, 0))[first:]
    for op, kernel, other in ((GROUPED_MM, by_kernel, w), (GROUPED_OUTER, outer_by_kernel, y)):
        for each in (other, other.mT.contiguous().mT):
            assert torch.equal(kernel(x, each, begins, ends, E), op(x, each, begins, ends, E))


def test_flops_are_counted() -> None:
    """Of a product, and of each of its two gradients."""
    nodes = [n for n in trace(slope)(X, W, ENDS, COTANGENT).calls]
    products = [n for n in nodes if n.target in (GROUPED_MM, GROUPED_OUTER)]
    assert [flops(n) for n in products] == [2 * S * K * N] * 3


# -- HuggingFace's experts ------------------------------------------------------------------------


def mixtral() -> tuple[Fn, dict[str, torch.Tensor], torch.Tensor]:
    """A block of Mixtral's experts, its parameters, and its input."""
    transformers = pytest.importorskip("transformers", reason="a group of optional packages")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from torchard import functionalize

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.1)
    fn, params = functionalize(block)
    return lambda p, x: fn(p, x), params, torch.randn(4, 16, 32)


SPECS = {
    "tokens": ({}, P("a")),
    "experts": ({"experts.gate_up_proj": P("a"), "experts.down_proj": P("a")}, P()),
    "features": (
        {"experts.gate_up_proj": P(None, "a"), "experts.down_proj": P(None, None, "a")},
        P(),
    ),
    "tokens and experts": ({"experts.gate_up_proj": P("a"), "experts.down_proj": P("a")}, P("a")),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_experts_of_mixtral(name: str, size: int) -> None:
    """Tokens stay, or go to their experts and back; experts are not sent."""
    fn, params, x = mixtral()
    given, tokens = SPECS[name]
    mesh = Mesh({"a": size}, virtual=True)
    specs = {key: given.get(key, P()) for key in params}
    run = shard(fn, mesh, (specs, tokens))
    torch.testing.assert_close(whole(run(params, x)), fn(params, x), rtol=1e-4, atol=1e-5)
    plan, work = run.lower(params, x).collectives, run.lower(params, x).work
    assert not plan or name != "tokens"
    tokens_twice = 2 * (size - 1) * x.numel() * 4 / size
    most = {"tokens": 0, "experts": tokens_twice, "tokens and experts": 1.2 * tokens_twice}
    assert sum(c.bytes for c in plan) <= most.get(name, 3 * tokens_twice)
    assert work.rank_flops < 1.3 * work.flops / size
    slopes = grad(lambda p, x: (fn(p, x) ** 2).sum())
    have, want = shard(slopes, mesh, (specs, tokens))(params, x), slopes(params, x)
    for key in want:
        torch.testing.assert_close(whole(have[key]), want[key], rtol=1e-4, atol=1e-4)
