"""Derivatives of small functions on a mesh, stacked in every way, are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchard import Mesh, P, checkpoint, place, policies, shard

MESH = Mesh({"tp": 2}, virtual=True)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full() if hasattr(value, "full") else value
    return full


def compare(have: Any, want: Any) -> None:
    pairs = zip(have, want, strict=True) if isinstance(want, tuple) else [(have, want)]
    for one, other in pairs:
        torch.testing.assert_close(whole(one), other, rtol=1e-10, atol=1e-10)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("order", ["outside", "around", "inside"])
@pytest.mark.parametrize("name", NORMS)
def test_a_budget_of_operations_without_parameters(name: str, order: str) -> None:
    """Their derivatives' last results are None."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = NORMS[name](F.conv1d(x, w, padding=1).sin())
        return x.square().sum()

    def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
        return checkpoint(fn, policy=policies.budget(fraction=0.5))

    x, w = random(4, 6, 8), random(6, 6, 3)
    stacks = {
        "outside": torch.func.grad(checked(shard(loss, MESH)), (0, 1)),
        "around": torch.func.grad(shard(checked(loss), MESH), (0, 1)),
        "inside": shard(torch.func.grad(checked(loss), (0, 1)), MESH),
    }
    compare(stacks[order](place(x, MESH, P("tp")), w), torch.func.grad(loss, (0, 1))(x, w))


FACTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: (torch.fft.rfft(x) * (1 + 2j)).abs().sum(),
    "complex, divided": lambda x: (torch.fft.rfft(x) / (1 + 2j) - 0.5j).abs().sum(),
    "complex, a power": lambda x: ((x + 3j) ** (2 + 0.5j)).abs().sum(),
    "real": lambda x: (torch.fft.rfft(x) * 3.0).abs().sum(),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=str)
@pytest.mark.parametrize("name", FACTORS)
def test_a_number_as_a_factor(name: str, spec: P, inside: bool) -> None:
    fn, x = FACTORS[name], random(4, 6)
    derive = torch.func.grad(fn)
    run = shard(lambda x: derive(x), MESH) if inside else torch.func.grad(shard(fn, MESH))
    compare(run(place(x, MESH, spec)), derive(x))


# -- values that views of a sum share, in stacks of shards and derivatives ---------------------------

GRID = Mesh({"a": 2, "b": 2}, virtual=True)
SPECS = [P("a"), P(None, "a"), P("a", "b"), P(("a", "b")), P("b", "a"), P()]

Matrix = Callable[[torch.Tensor], torch.Tensor]


def rows_and_columns(x: torch.Tensor) -> torch.Tensor:
    total = (x @ x.mT).sum(0)
    return total.view(1, -1).permute(1, 0) * total.view(-1, 1)


# Of a matrix [4, 6]: each uses one sum in two ways, itself and views of it.
SHARED: dict[str, Matrix] = {
    "row by row": lambda x: torch.einsum("bi,bi->b", x, x),
    "outer": lambda x: torch.einsum("bi,bj->ij", x, x).softmax(0) @ x.mT,
    "a sum and its rows": lambda x: x.sum(0, keepdim=True) * x,
    "unsqueezed": lambda x: x.sum(0).unsqueeze(0) * x + (x.sum(0).unsqueeze(1) @ x[:1]).sum(0),
    "permuted": lambda x: (x @ x.mT).permute(1, 0) @ x + (x.mT @ x).t().sum(),
    "both ways": rows_and_columns,
    "squares": lambda x: (x.mT @ x).sum(0).unsqueeze(-1) * (x.mT @ x).sum(0).unsqueeze(0),
    "linear": lambda x: F.linear(x.sum(1, keepdim=True).sin(), x.mT @ x[:, :1]),
    "weighted": lambda x: torch.einsum("bi,ij,bj->b", x, x.mT @ x, x),
    "centred": lambda x: (x - x.mean(0)).square().sum(0),
}


def directed(fn: Matrix) -> Matrix:
    """The derivative of the gradient along a direction."""
    direction = random(4, 6).cos()
    return lambda x: torch.func.jvp(torch.func.grad(fn), (x,), (direction,))[1]


DERIVATIVES: dict[str, Callable[[Matrix], Matrix]] = {
    "gradient": torch.func.grad,
    "gradient of a gradient": lambda fn: torch.func.grad(lambda x: torch.func.grad(fn)(x).sin().sum()),
    "derivative of a gradient": directed,
    "gradients of rows": lambda fn: torch.func.vmap(
        torch.func.grad(lambda row: fn(torch.stack([row, row.sin(), row * 2, row.cos()])))
    ),
}


def in_stack(stack: str, derive: Callable[[Matrix], Matrix], fn: Matrix, inner: P) -> Matrix:
    if stack == "shard(derivative)":
        return shard(derive(fn), GRID)
    if stack == "shard(shard(derivative))":
        return shard(shard(derive(fn), GRID, in_specs=(inner,)), GRID)
    return shard(derive(shard(fn, GRID, in_specs=(inner,))), GRID)


@given(
    name=st.sampled_from(sorted(SHARED)),
    derivative=st.sampled_from(sorted(DERIVATIVES)),
    stack=st.sampled_from(
        ["shard(derivative)", "shard(shard(derivative))", "shard(derivative(shard))"]
    ),
    outer=st.sampled_from(SPECS),
    inner=st.sampled_from(SPECS),
)
@example("outer", "gradient", "shard(derivative(shard))", P("a", "b"), P(("a", "b")))
@example("row by row", "derivative of a gradient", "shard(derivative(shard))", P(("a", "b")), P("b", "a"))
@settings(max_examples=examples(6, 700), deadline=None, database=None, derandomize=True)
def test_views_of_sums(name: str, derivative: str, stack: str, outer: P, inner: P) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return SHARED[name](x).tanh().sin().sum()

    x, derive = random(4, 6) / 3, DERIVATIVES[derivative]
    compare(in_stack(stack, derive, fn, inner)(place(x, GRID, outer)), derive(fn)(x))


# -- sums that are reduced once ----------------------------------------------------------------------

DP = Mesh({"dp": 4}, virtual=True)


@pytest.mark.parametrize("start", ["zeros", "zeros of a shape", "none"])
def test_gradients_added_up_from_zeros_are_reduced_once(start: str) -> None:
    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"] + p["b"]).tanh().square().sum()

    def zeros(v: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(v) if start == "zeros" else torch.zeros(v.shape, dtype=v.dtype)

    def step(p: dict[str, torch.Tensor], batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = None if start == "none" else {k: zeros(v) for k, v in p.items()}
        for x in batches:
            g = torch.func.grad(loss)(p, x)
            total = g if total is None else {k: total[k] + g[k] for k in g}
        assert total is not None
        return tuple(total.values())

    p, batches = {"w": random(8, 8), "b": random(8)}, random(6, 4, 8)
    run = shard(step, DP, in_specs=(P(), P(None, "dp")))
    compare(run(p, batches), step(p, batches))
    assert [(c.kind, c.shape) for c in run.lower(p, batches).collectives] == [("all_reduce", (72,))]


@pytest.mark.parametrize("zero", [torch.zeros_like, lambda v: torch.zeros(v.shape, dtype=v.dtype)])
def test_zero_is_folded_where_it_changes_nothing(zero: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return zero(y) + y, y + zero(y), y - zero(y), zero(y) - y

    x = random(8, 4)
    compare(shard(fn, DP, in_specs=(P("dp"),))(x), fn(x))


PIECES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w[:8],
    "rows with a step": lambda w: w[1:17:2],
    "a matrix": lambda w: w.view(4, 8, 8)[2],
    "a diagonal": lambda w: torch.diag_embed(w[:8].diagonal()),
}


@pytest.mark.parametrize("times", [2, 9])
@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_used_often_has_one_gradient(piece: str, times: int) -> None:
    def loss(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ PIECES[piece](w)).tanh().sum() for x in xs]).sum()

    w, xs, gradient = random(32, 8), random(times, 4, 8), torch.func.grad(loss)
    run = shard(gradient, DP, in_specs=(P(), P(None, "dp")))
    compare(run(w, xs), gradient(w, xs))
    (reduced,) = run.lower(w, xs).collectives
    assert reduced.bytes <= 2 * 8 * 64 * 3 / 4


@pytest.mark.parametrize("stack", ["fuse", "shard", "fuse of shard", "checkpoint"])
def test_what_nobody_reads_is_not_run(stack: str) -> None:
    """A gradient that is taken inside has no use for the forward's last operations."""

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b)).sum()

    gradient = torch.func.grad(loss, (0, 1, 2))
    stacks = {
        "fuse": fuse(gradient),
        "shard": shard(gradient, MESH),
        "fuse of shard": fuse(shard(gradient, MESH)),
        "checkpoint": checkpoint(gradient),
    }
    args = random(64, 32), random(16, 32), random(16)
    program = stacks[stack].lower(*args)
    assert all(node.users for node in program.calls)
    compare(stacks[stack](*args), gradient(*args))
