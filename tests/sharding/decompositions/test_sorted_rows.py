"""Tokens sorted by expert: each rank sorts its own, if no result depends on the order within the sort.

The reference is the function on one device; values are small integers in float64, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole
from torch.func import grad

from torchard import AccumulateError, Mesh, P, accumulate, shard
from torchard.functional.effects.grouped_products import GROUPED_MM
from torchard.testing import prove

T, K, H, N, E = 24, 2, 4, 8, 5
S = T * K
GENERATOR = torch.Generator().manual_seed(0)
Fn = Callable[..., torch.Tensor]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=GENERATOR).double()


X, UP, DOWN, BIAS = integers(T, H), integers(E, H, N), integers(E, N, H), integers(E, N)
IDS = torch.randint(0, E, (T, K), generator=GENERATOR)
WEIGHTS, COTANGENT, NOISE = integers(T, K), integers(T, H), integers(S, 1)
ARGS = X, UP, DOWN, WEIGHTS, IDS
SPECS = P("a"), P(), P(), P("a"), P("a")


def ends_of(ids: torch.Tensor) -> torch.Tensor:
    counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return GROUPED_MM(x, w, F.pad(ends[:-1], (1, 0)), ends, len(ends))  # type: ignore[no-any-return]


def by_index_put(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(S)
    return inverse


def by_order(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort()
    return ids[order], order


def experts(
    between: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda y, ids: y.relu(),
    inverse: Callable[[torch.Tensor], torch.Tensor] = by_index_put,
    back: Callable[[torch.Tensor], torch.Tensor] | None = None,
    counted: Callable[..., torch.Tensor] = lambda groups, ids: groups,
    sort: Callable[[torch.Tensor], Any] = torch.sort,
) -> Fn:
    """As HuggingFace's: ``between`` is applied to the sorted rows of hidden units."""

    def fn(
        x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, p: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        groups, order = sort(ids.reshape(-1))
        ends = ends_of(counted(groups, ids.reshape(-1)))
        hidden = between(product(x[order // K], up, ends), groups)
        y = product(hidden, down, ends) * p.reshape(-1)[order][:, None]
        y = y[inverse(order)] if back is None else back(y)
        return y.reshape(T, K, H).sum(1)

    return fn


def by_hand(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, p: torch.Tensor, ids: Any) -> Any:
    """Token by token."""
    each = torch.einsum("th,tkhn->tkn", x, up[ids]).relu()
    return (torch.einsum("tkn,tknh->tkh", each, down[ids]) * p[..., None]).sum(1)


STAYING: dict[str, Fn] = {
    "as HuggingFace's": experts(),
    "stable": experts(sort=lambda ids: ids.sort(stable=True)),
    "by the order alone": experts(sort=by_order, inverse=lambda order: order.argsort(stable=True)),
    "counted before they are sorted": experts(counted=lambda groups, ids: ids),
    "inverse by a second sort": experts(inverse=lambda order: order.argsort()),
    "a bias of each expert": experts(lambda y, ids: (y + BIAS[ids]).relu()),
    "a norm of each row": experts(lambda y, ids: y - y.sum(1, keepdim=True)),
    "a value of all rows": experts(lambda y, ids: y * y.amax() - y.sum(0)),
    "halves": experts(lambda y, ids: torch.cat([y.chunk(2, 1)[1] * 2, y.chunk(2, 1)[0]], 1)),
}
# Results that depend on the order in which rows are sorted.
DEPENDING: dict[str, Fn] = {
    "a factor by position": experts(lambda y, ids: y * NOISE),
    "a running sum": experts(lambda y, ids: y.cumsum(0)),
    "a neighbour": experts(lambda y, ids: y + y.roll(1, 0)),
    "a row": experts(lambda y, ids: y + y[3]),
    "rows reversed": experts(lambda y, ids: y.flip(0)),
    "rows that are left sorted": experts(back=lambda y: y),
    "largest first": experts(sort=lambda ids: ids.sort(stable=True, descending=True)),
    "reversed inverse": experts(inverse=lambda order: order.sort(stable=True, descending=True)[1]),
    "other ids by the order": experts(sort=lambda ids: ((ids + 1)[ids.argsort()] % E, ids.argsort())),
    "groups of other sizes": experts(counted=lambda groups, ids: (groups + 1) % E),
}


def slope(fn: Fn) -> Fn:
    return grad(lambda *args: (fn(*args[:-1]) * args[-1]).sum(), (0, 1, 2, 3))


def sent(program: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(c.kind, tuple(c.shape)) for c in program.collectives]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", STAYING)
def test_tokens_stay(name: str, size: int) -> None:
    """Forward, nothing is sent (but a value of all rows); backward, the gradients of the experts."""
    fn, mesh = STAYING[name], Mesh({"a": size}, virtual=True)
    run = shard(fn, mesh, SPECS, P("a"))
    program = run.lower(*ARGS)
    assert all(c.kind == "all_reduce" and len(c.shape) < 2 for c in program.collectives)
    assert name == "a value of all rows" or not program.collectives
    assert program.work.rank_flops < 1.1 * program.work.flops / size
    assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
    prove(program)
    args = *ARGS, COTANGENT
    run = shard(slope(fn), mesh, (*SPECS, P("a")), (P("a"), P(), P(), P("a")))
    assert all(c.kind == "all_reduce" for c in run.lower(*args).collectives)
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        torch.testing.assert_close(whole(have), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", DEPENDING)
def test_what_depends_on_the_order_keeps_it(name: str, size: int) -> None:
    fn, mesh = DEPENDING[name], Mesh({"a": size}, virtual=True)
    run = shard(fn, mesh, SPECS, P("a"))
    assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
    run, args = shard(slope(fn), mesh, (*SPECS, P("a")), (P("a"), P(), P(), P("a"))), (*ARGS, COTANGENT)
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        assert torch.equal(whole(have), want)


@pytest.mark.parametrize("name", STAYING)
def test_tokens_by_microbatches(name: str) -> None:
    """A microbatch sorts its own tokens."""
    fn, args = slope(STAYING[name]), (*ARGS, COTANGENT)
    run = accumulate(fn, 3, batch=(0, None, None, 0, 0, 0))
    if name == "a value of all rows":
        with pytest.raises(AccumulateError, match="a sum over the whole batch"):
            run(*args)
        return
    for have, want in zip(run(*args), fn(*args), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DEPENDING)
def test_microbatches_need_an_order_of_their_own(name: str) -> None:
    run = accumulate(slope(DEPENDING[name]), 3, batch=(0, None, None, 0, 0, 0))
    with pytest.raises(AccumulateError, match=r"aten\.sort.*the whole batch"):
        run(*ARGS, COTANGENT)


def test_gradients_that_are_taken_outside() -> None:
    floats = [a.clone().requires_grad_() for a in ARGS[:4]]
    out = shard(experts(), Mesh({"a": 2}, virtual=True), SPECS, P("a"))(*floats, IDS)
    (whole(out) * COTANGENT).sum().backward()
    for have, want in zip(floats, slope(experts())(*ARGS, COTANGENT), strict=True):
        assert torch.equal(have.grad, want)


def test_the_gradient_is_one_reduction() -> None:
    mesh, args = Mesh({"a": 2}, virtual=True), (*ARGS, COTANGENT)
    run = shard(slope(experts()), mesh, (*SPECS, P("a")), (P("a"), P(), P(), P("a")))
    assert sent(run.lower(*args)) == [("all_reduce", (UP.numel() + DOWN.numel(),))]


def test_rows_that_are_returned_stay_sorted() -> None:
    def fn(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = args[-1].reshape(-1).sort().values
        return experts(lambda y, ids: y * (ids == groups)[:, None])(*args), groups

    have = shard(fn, Mesh({"a": 2}, virtual=True), SPECS, P())(*ARGS)
    for each, want in zip(have, fn(*ARGS), strict=True):
        assert torch.equal(whole(each), want)

    def hidden(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        out = experts(lambda y, ids: (kept.append(y), y.relu())[1])(*args)
        return out, kept[0]

    have = shard(hidden, Mesh({"a": 2}, virtual=True), SPECS, P())(*ARGS)
    for each, want in zip(have, hidden(*ARGS), strict=True):
        assert torch.equal(whole(each), want)


def test_experts_are_those_of_each_token() -> None:
    assert torch.equal(experts()(*ARGS), by_hand(*ARGS))


def test_places_that_are_no_experts_add_nothing() -> None:
    """As expert parallelism marks tokens of other ranks: ids after the last are in no group."""
    args = *ARGS[:4], torch.where(IDS == 1, E, IDS)
    run = shard(experts(), Mesh({"a": 3}, virtual=True), SPECS, P("a"))
    assert not run.lower(*args).collectives
    assert torch.equal(whole(run(*args)), experts()(*args))


def test_tokens_that_do_not_divide_are_sorted_together() -> None:
    mesh = Mesh({"a": 5}, virtual=True)
    run = shard(experts(), mesh, SPECS, P("a"))
    assert torch.equal(whole(run(*ARGS)), experts()(*ARGS))


# -- other spellings ------------------------------------------------------------------------------

Step = Callable[..., torch.Tensor]
COUNTS: dict[str, Step] = {
    "one_hot": lambda ids: F.one_hot(ids, E).sum(0).cumsum(0).to(torch.int32),
    "compared": lambda ids: (ids[:, None] == torch.arange(E)).sum(0).cumsum(0, dtype=torch.int32),
    "scatter_add": lambda ids: (
        torch.zeros(E, dtype=ids.dtype).scatter_add(0, ids, torch.ones_like(ids)).cumsum(0).int()
    ),
    "index_add": lambda ids: torch.zeros(E).index_add(0, ids, torch.ones(S)).cumsum(0).int(),
    "index_put": lambda ids: (
        torch.zeros(E).index_put((ids,), torch.ones(S), accumulate=True).int().cumsum(0).int()
    ),
}
TAKEN: dict[str, Step] = {
    "index_select": lambda x, at: x.index_select(0, at),
    "gather": lambda x, at: x.gather(0, at[:, None].expand(-1, x.shape[1])),
}
BACK: dict[str, Step] = {
    "index_add": lambda y, order: torch.zeros(T, H).to(y).index_add(0, order // K, y),
    "scatter_add": lambda y, order: (
        torch.zeros(T, H).to(y).scatter_add(0, (order // K)[:, None].expand(-1, H), y)
    ),
    "index_put": lambda y, order: torch.zeros(T, H).to(y).index_put((order // K,), y, accumulate=True),
    "an inverse by scatter": lambda y, order: (
        y[torch.empty_like(order).scatter(0, order, torch.arange(S))].reshape(T, K, H).sum(1)
    ),
}
SPELLINGS = {
    **{f"counts by {n}": (step, TAKEN["index_select"], BACK["index_add"]) for n, step in COUNTS.items()},
    **{f"taken by {n}": (COUNTS["one_hot"], step, BACK["index_put"]) for n, step in TAKEN.items()},
    **{f"back by {n}": (COUNTS["one_hot"], TAKEN["gather"], step) for n, step in BACK.items()},
}


def spelled(count: Step, take: Step, back: Step) -> Fn:
    def fn(
        x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, p: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        flat = ids.reshape(-1)
        order, ends = flat.argsort(stable=True), count(flat)
        hidden = product(take(x, order // K), up, ends).relu()
        return back(product(hidden, down, ends) * take(p.reshape(-1, 1), order), order)

    return fn


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings(name: str) -> None:
    fn, mesh, args = spelled(*SPELLINGS[name]), Mesh({"a": 2}, virtual=True), (*ARGS, COTANGENT)
    assert torch.equal(fn(*ARGS), by_hand(*ARGS))
    run = shard(fn, mesh, SPECS, P("a"))
    assert not run.lower(*ARGS).collectives
    assert torch.equal(whole(run(*ARGS)), fn(*ARGS))
    run = shard(slope(fn), mesh, (*SPECS, P("a")), (P("a"), P(), P(), P("a")))
    assert [c.kind for c in run.lower(*args).collectives] == ["all_reduce"]
    for have, want in zip(run(*args), slope(fn)(*args), strict=True):
        assert torch.equal(whole(have), want)
    for steps in (1, 3):
        run = accumulate(slope(fn), steps, batch=(0, None, None, 0, 0, 0))
        for have, want in zip(run(*args), slope(fn)(*args), strict=True):
            assert torch.equal(have, want)


@pytest.mark.parametrize(
    "count",
    [
        lambda ids: (ids[:, None] == torch.arange(E) + 1).sum(0).cumsum(0, dtype=torch.int32),
        lambda ids: torch.zeros(E).index_add(0, ids, torch.full((S,), 0.5)).cumsum(0).int(),
        lambda ids: F.one_hot(ids.flip(0) // 2, E).sum(0).cumsum(0).to(torch.int32),
    ],
)
def test_counts_of_something_else(count: Step) -> None:
    fn, mesh = spelled(count, TAKEN["gather"], BACK["index_add"]), Mesh({"a": 2}, virtual=True)
    assert torch.equal(whole(shard(fn, mesh, SPECS, P("a"))(*ARGS)), fn(*ARGS))
