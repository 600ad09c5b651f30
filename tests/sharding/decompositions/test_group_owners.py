"""Experts that are split over ranks: tokens go to them and back, and no expert is sent.

The reference is the function on one device; values are small integers in float64, so that sums are exact,
or there are bounds of rounding. Bytes are derived by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import whole
from torch.func import grad

from torchard import Mesh, P, accumulate, checkpoint, jit, shard
from torchard.functional.effects.grouped_products import GROUPED_MM, GROUPED_OUTER
from torchard.testing import prove

T, K, H, N, E = 24, 2, 6, 8, 12
S = T * K
GENERATOR = torch.Generator().manual_seed(0)
Fn = Callable[..., torch.Tensor]
Between = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of hidden units and their experts


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=GENERATOR).double()


X, UP, DOWN, BIAS = integers(T, H), integers(E, H, N), integers(E, N, H), integers(E, N)
IDS = torch.randint(0, E, (T, K), generator=GENERATOR)
WEIGHTS, COTANGENT, NOISE = integers(T, K), integers(T, H), integers(S, N)
ARGS = X, UP, DOWN, WEIGHTS, IDS
HERE, SPLIT = P(), P("a")  # tokens that all ranks have, and tokens of each rank


def ends_of(ids: torch.Tensor) -> torch.Tensor:
    counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return GROUPED_MM(x, w, F.pad(ends[:-1], (1, 0)), ends, len(ends))  # type: ignore[no-any-return]


def experts(between: Between = lambda y, ids: y.relu()) -> Fn:
    """As HuggingFace's: ``between`` is applied to the sorted rows of hidden units."""

    def fn(
        x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, p: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        groups, order = ids.reshape(-1).sort()
        ends = ends_of(groups)
        hidden = between(product(x[order // K], up, ends), groups)
        y = product(hidden, down, ends) * p.reshape(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(S)
        return y[inverse].reshape(T, K, H).sum(1)

    return fn


def slope(fn: Fn, of: tuple[int, ...] = (0, 1, 2, 3)) -> Fn:
    return grad(lambda *args: (fn(*args[:-1]) * args[-1]).sum(), of)


def gated(y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, 1)
    return torch.cat([a.relu() * b, b], 1)


def squared(y: torch.Tensor) -> torch.Tensor:
    return y * y


# Row by row: hidden units stay with their experts.
STAYING: dict[str, Between] = {
    "relu": lambda y, ids: y.relu(),
    "a gate": gated,
    "not zero at zero": lambda y, ids: (y - 1).abs() * (1 + y.relu()),
    "a bias of each expert": lambda y, ids: (y + BIAS[ids]).relu(),
    "a factor by position": lambda y, ids: y * NOISE,
    "a mask": lambda y, ids: torch.where(y > 1, y, -y),
    "several results": lambda y, ids: y.topk(N, 1).values + y.topk(N, 1).indices.flip(1),
    "columns": lambda y, ids: y.t().contiguous().relu().t(),
}
# Rows that are read across experts.
READ: dict[str, Between] = {
    "a running sum": lambda y, ids: y.cumsum(0),
    "a neighbour": lambda y, ids: y + y.roll(1, 0),
    "a sum of rows": lambda y, ids: y - y.sum(0),
    "the largest": lambda y, ids: y - y.amax(0),
    "reversed": lambda y, ids: y.flip(0),
    "squared sums": lambda y, ids: y + (y.sum(0) * y.sum(0)).sum(),
    "a square of sums": lambda y, ids: y + squared(y.sum(0)).sum(),
    "a sum, and what it is added to": lambda y, ids: y.relu() + y.relu().flip(0) * y,
    "pairs of rows": lambda y, ids: y.reshape(S // 2, 2 * N).relu().reshape(S, N),
}
BETWEEN = STAYING | READ


def specs(tokens: P) -> tuple[P, ...]:
    return tokens, SPLIT, SPLIT, tokens, tokens


def share(n: int, *shape: int) -> float:
    """The bytes of an all_gather or a psum_scatter; an all_reduce sends twice as many."""
    return (n - 1) / n * math.prod(shape) * 8


def beside(n: int, name: str, slots: int) -> float:
    """The bytes of what is gathered beside tokens: of slots, order and factors; of experts, places."""
    slots += name == "a bias of each expert"
    return share(n, slots, S) + share(n, n, E)  # begins and ends have four bytes


# In blocks of each rank's tokens rows have other positions, so that all are sorted together.
BY_POSITION = ("a factor by position",)


# Of most operations, one size: they differ in the operations between products alone.
SIZES = [(name, size) for name in STAYING for size in ([2, 3, 4] if name == "a gate" else [3])]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_tokens_go_to_experts_and_back(name: str, size: int) -> None:
    """Tokens are gathered, their sums are scattered; where all ranks have them, sums are all_reduced."""
    fn, mesh = experts(STAYING[name]), Mesh({"a": size}, virtual=True)
    for tokens in (HERE, SPLIT):
        run = shard(fn, mesh, specs(tokens), tokens)
        program = run.lower(*ARGS)
        sent = 2 * share(size, T, H) + (beside(size, name, 3) if tokens == SPLIT else 0)
        if tokens == HERE or name not in BY_POSITION:
            assert sum(c.bytes for c in program.collectives) == sent, program.collectives
        products = 4 * S * H * N
        assert program.work.rank_flops <= products / size + program.work.flops - products
        assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
        prove(program)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_gradients_go_the_same_way(name: str, size: int) -> None:
    """Tokens and cotangents are gathered, sums of tokens and of factors scattered, and no expert's."""
    fn, mesh, args = slope(experts(STAYING[name])), Mesh({"a": size}, virtual=True), (*ARGS, COTANGENT)
    for tokens in (HERE, SPLIT):
        run = shard(fn, mesh, (*specs(tokens), tokens), (tokens, SPLIT, SPLIT, tokens))
        program = run.lower(*args)
        sent = 2 * share(size, T, H) + 2 * share(size, S)
        if tokens == SPLIT:
            sent = 3 * share(size, T, H) + beside(size, name, 5)
        if tokens == HERE or name not in BY_POSITION:
            assert sum(c.bytes for c in program.collectives) == sent, program.collectives
        for have, want in zip(run(*args), fn(*args), strict=True):
            assert torch.equal(whole(have), want)
        prove(program)


def test_running_sums_of_features(capfd: pytest.CaptureFixture[str]) -> None:
    """The operation that replaces their gradient is mapped over owners: torch does not warn of a loop."""
    fn, args = slope(experts(lambda y, ids: y.cumsum(1) + y.cumsum(-1))), (*ARGS, COTANGENT)
    run = shard(fn, Mesh({"a": 3}, virtual=True), (*specs(HERE), HERE), (HERE, SPLIT, SPLIT, HERE))
    for have, want in zip(run(*args), fn(*args), strict=True):
        assert torch.equal(whole(have), want)
    assert "torchard::" not in capfd.readouterr().err


@pytest.mark.parametrize("tokens", [HERE, SPLIT])
def test_rows_of_other_experts_may_be_infinite(tokens: P) -> None:
    """They are not read: of 1 / y, an expert's own rows are finite."""
    fn, mesh = experts(lambda y, ids: 1 / y), Mesh({"a": 3}, virtual=True)
    args = X.abs() + 1, UP.abs() + 1, DOWN, WEIGHTS, IDS, COTANGENT
    run = shard(slope(fn), mesh, (*specs(tokens), tokens), (tokens, SPLIT, SPLIT, tokens))
    sent = 3 * share(3, T, H) + beside(3, "", 5) if tokens == SPLIT else 2 * share(3, T * H + S)
    assert sum(c.bytes for c in run.lower(*args).collectives) == sent
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        torch.testing.assert_close(whole(have), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", READ)
def test_rows_that_are_read_across_experts(name: str) -> None:
    fn, mesh = experts(READ[name]), Mesh({"a": 2}, virtual=True)
    slopes, args = slope(fn), (*ARGS, COTANGENT)
    for tokens in (HERE, SPLIT):
        run = shard(fn, mesh, specs(tokens), tokens)
        assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
        prove(run.lower(*ARGS))
        run = shard(slopes, mesh, (*specs(tokens), tokens), (tokens, SPLIT, SPLIT, tokens))
        for have, want in zip(run(*args), slopes(*args), strict=True):
            assert torch.equal(whole(have), want)


# -- rows that are sorted already -----------------------------------------------------------------

ENDS = torch.tensor([3, 5, 5, 14, 14, 20, 25, 25, 31, 38, 40, 43], dtype=torch.int32)  # 5 of no expert
ROWS, OUT = integers(S, H), integers(S, H)


def sorted_rows(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return product((product(x, up, ends) - 1).abs(), down, ends) + 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_no_expert(size: int) -> None:
    """They are zero after each product, but not after what comes in between."""

    def fn(*args: torch.Tensor) -> torch.Tensor:
        return sorted_rows(*args).abs()

    mesh, args = Mesh({"a": size}, virtual=True), (ROWS, UP, DOWN, ENDS)
    for rows in (HERE, SPLIT):
        run = shard(fn, mesh, (rows, SPLIT, SPLIT, HERE), rows)
        assert torch.equal(whole(run(*args)), fn(*args))
        sent = 2 * share(size, S, H)
        assert sum(c.bytes for c in run.lower(*args).collectives) == sent
        slopes = slope(fn, (0, 1, 2))
        run = shard(slopes, mesh, (rows, SPLIT, SPLIT, HERE, rows), (rows, SPLIT, SPLIT))
        for have, want in zip(run(*args, OUT), slopes(*args, OUT), strict=True):
            assert torch.equal(whole(have), want)


def test_groups_at_other_places() -> None:
    """Rows of the second product belong to other experts than those of the first."""

    def fn(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return product(product(x, up, ends).relu(), down, ends.flip(0).neg() + S)

    args = ROWS, UP, DOWN, ENDS
    for rows in (HERE, SPLIT):
        run = shard(fn, Mesh({"a": 2}, virtual=True), (rows, SPLIT, SPLIT, HERE), rows)
        assert torch.equal(whole(run(*args)), fn(*args))


# -- stacks, meshes -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [P("d"), P(("d", "a")), P(("a", "d"))])
def test_tokens_over_another_axis(tokens: P) -> None:
    """Tokens are gathered along the axis of the experts alone."""
    fn, mesh = experts(gated), Mesh({"d": 2, "a": 3}, virtual=True)
    run = shard(fn, mesh, specs(tokens), tokens)
    for c in run.lower(*ARGS).collectives:
        assert c.axes == ("a",) or len(c.shape) < 3
    assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
    args = *ARGS, COTANGENT
    run = shard(slope(fn), mesh, (*specs(tokens), tokens), (tokens, SPLIT, SPLIT, tokens))
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        assert torch.equal(whole(have), want)


def test_positions_are_split_too() -> None:
    """Each rank along the batch's axis sorts its own sequences: tokens are gathered along the other."""

    def fn(x: torch.Tensor, up: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        flat = [a.reshape(T, -1) for a in args[1:]]
        return experts(gated)(x.reshape(T, H), up, args[0], *flat).reshape(x.shape)

    x, weights, ids, cotangent = (a.reshape(4, 6, -1) for a in (X, WEIGHTS, IDS, COTANGENT))
    args, tokens = (x, UP, DOWN, weights, ids), P("d", "a")
    mesh = Mesh({"d": 2, "a": 2}, virtual=True)
    program = shard(fn, mesh, specs(tokens), tokens).lower(*args)
    assert {c.axes for c in program.collectives} == {("a",)}
    assert program.work.rank_flops < 0.3 * program.work.flops
    run = shard(slope(fn), mesh, (*specs(tokens), tokens), (tokens, SPLIT, SPLIT, tokens))
    work = run.lower(*args, cotangent).work
    assert work.rank_flops < 0.3 * work.flops
    for have, want in zip(run(*args, cotangent), slope(fn)(*args, cotangent), strict=True):
        assert torch.equal(whole(have), want)


def test_experts_whose_features_are_split_too() -> None:
    fn, mesh = experts(), Mesh({"a": 2, "t": 2}, virtual=True)
    given = SPLIT, P("a", None, "t"), P("a", "t"), SPLIT, SPLIT
    run = shard(fn, mesh, given, SPLIT)
    program = run.lower(*ARGS)
    assert program.work.rank_flops < 0.33 * program.work.flops
    assert not any(len(c.shape) == 3 and c.shape[-1] in (N, N // 2) for c in program.collectives)
    assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
    prove(program)


STACKS: dict[str, Callable[[Fn, Mesh], Fn]] = {
    "checkpoint": lambda fn, mesh: shard(
        lambda *args: slope(checkpoint(fn))(*args), mesh, (*specs(SPLIT), SPLIT)
    ),
    "accumulate": lambda fn, mesh: accumulate(
        shard(slope(fn), mesh, (*specs(SPLIT), SPLIT)), 2, batch=(0, None, None, 0, 0, 0)
    ),
    "accumulate inside": lambda fn, mesh: shard(
        accumulate(slope(fn), 2, batch=(0, None, None, 0, 0, 0)), mesh, (*specs(SPLIT), SPLIT)
    ),
    "jit": lambda fn, mesh: jit(shard(slope(fn), mesh, (*specs(SPLIT), SPLIT)), backend="eager"),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name: str) -> None:
    fn, args = experts(gated), (*ARGS, COTANGENT)
    run = STACKS[name](fn, Mesh({"a": 2}, virtual=True))
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        torch.testing.assert_close(whole(have), want, rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    def fn(*args: torch.Tensor) -> torch.Tensor:
        return grad(lambda *a: (slope(experts(lambda y, ids: y**3), (1,))(*a)[0] ** 2).sum(), 2)(*args)

    args = *(a * 0.1 if a.is_floating_point() else a for a in ARGS), COTANGENT
    run = shard(fn, Mesh({"a": 2}, virtual=True), (*specs(SPLIT), SPLIT))
    torch.testing.assert_close(whole(run(*args)), fn(*args), rtol=1e-10, atol=1e-10)


def test_gradients_that_are_taken_outside() -> None:
    floats = [a.clone().requires_grad_() for a in ARGS[:4]]
    out = shard(experts(gated), Mesh({"a": 2}, virtual=True), specs(SPLIT), SPLIT)(*floats, IDS)
    (whole(out) * COTANGENT).sum().backward()
    for have, want in zip(floats, slope(experts(gated))(*ARGS, COTANGENT), strict=True):
        assert torch.equal(have.grad, want)


# -- random programs ------------------------------------------------------------------------------

STEPS: dict[str, Between] = {
    **BETWEEN,
    "a factor of each token": lambda y, ids: y * WEIGHTS.reshape(-1)[:, None],
    "its transpose": lambda y, ids: y @ y.t() @ y,
    "its mean": lambda y, ids: y - y.mean(1, keepdim=True),
    "twice": lambda y, ids: torch.stack([y, y.relu()]).sum(0),
    "added to another row": lambda y, ids: y.index_add(0, ids, y[:S]),
    "experts' means": lambda y, ids: y - y.new_zeros(E, N).index_add(0, ids, y)[ids],
    "its halves": lambda y, ids: torch.cat(y.split(S // 2), 1).reshape(S, N),
}


@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    st.sampled_from([HERE, SPLIT, P("d"), P(("d", "a")), P(None, "d")]),
    st.sampled_from([P("a"), P("a", "d"), P("a", None, "d"), P(("a", "d"))]),
    st.sampled_from([{"a": 2, "d": 1}, {"a": 3, "d": 2}, {"a": 2, "d": 2}]),
    st.booleans(),
)
@settings(max_examples=10)
def test_random_programs(
    steps: list[str], tokens: P, weights: P, axes: dict[str, int], each: bool
) -> None:
    """Any operations between two products; ``each``: experts' results are returned as they are sorted."""

    def between(y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for step in steps:
            y = STEPS[step](y, ids) / 2
        return y

    def whole_block(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        out = experts(lambda y, ids: (kept.append(between(y, ids)), kept[0])[1])(*args)
        return (out, *kept) if each else (out,)

    def fn(*args: torch.Tensor) -> Any:
        def total(*args: torch.Tensor) -> Any:
            out, *kept = whole_block(*args[:-1])
            return (out * args[-1]).sum() + sum(k.square().sum() for k in kept), kept

        return grad(total, (0, 1, 2, 3), has_aux=True)(*args)

    rows = P(tokens.entries[0]) if tokens.entries else P()
    given = tokens, weights, weights, rows, rows, tokens
    args = *(a / 4 if a.is_floating_point() else a for a in ARGS), COTANGENT
    program = shard(fn, Mesh(axes, virtual=True), given)
    (want, sorted_want), (have, sorted_have) = fn(*args), program(*args)
    for a, b in zip((*have, *sorted_have), (*want, *sorted_want), strict=True):
        torch.testing.assert_close(whole(a), b, rtol=1e-9, atol=1e-9)
    prove(program.lower(*args))


def test_examples_have_groups_of_their_own() -> None:
    """As `vmap` of products with owners would give them."""
    x, w = integers(2, S, H), integers(2, E, H, N)
    begins, ends = F.pad(ENDS[:-1], (1, 0)).expand(2, -1), ENDS.expand(2, -1)
    each = [GROUPED_MM(x[i], w[i], begins[i], ends[i], E) for i in range(2)]
    assert torch.equal(GROUPED_MM(x, w, begins, ends, E), torch.stack(each))
    y = integers(2, S, N)
    each = [GROUPED_OUTER(x[i], y[i], begins[i], ends[i], E) for i in range(2)]
    assert torch.equal(GROUPED_OUTER(x, y, begins, ends, E), torch.stack(each))
