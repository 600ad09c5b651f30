"""Lookups, bags, windows and experts over a split dim: the bytes that an expert's program would send.

Every rank sends exactly the bytes of a case, forward and gradient, with the work split; the comment
beside a case derives its bytes, and its plan is proved. Values are those of one device, and small
integers: sums are exact.

Of an array of ``size`` bytes over n ranks, a ring's all_reduce sends 2 (n - 1) / n size per rank, and
psum_scatter and all_gather (n - 1) / n size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole
from torch.func import grad, vmap

from torchard import Mesh, P, shard
from torchard.testing import prove

Fn = Callable[..., torch.Tensor]
Size = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """One function over a mesh of one axis, ``a``.

    Attributes:
        fn: a function of the arguments.
        args, specs: its arguments and how they are split; the gradients of floats are split as they are.
        out: how the result and its cotangent are split.
        forward, gradient: the bytes that a rank sends, by the number of ranks.
        every: FLOPs and elements that every rank computes besides its share, forward and gradient: an
            operation that multiplies nothing counts its largest operand or result, also one that it does
            not read as a whole, such as a table.
    """

    fn: Fn
    args: tuple[torch.Tensor, ...]
    specs: tuple[P, ...]
    out: P
    forward: Size
    gradient: Size
    every: tuple[int, int] = (0, 0)


GENERATOR = torch.Generator().manual_seed(0)


def x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=GENERATOR).to(dtype)


def ids(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=GENERATOR)


def nothing(n: int) -> float:
    return 0


def reduced(*shape: int, item: int = 8) -> Size:
    """The bytes of an all_reduce."""
    return lambda n: 2 * (n - 1) * torch.Size(shape).numel() * item / n


def gathered(*shape: int, item: int = 8) -> Size:
    """The bytes of an all_gather of the whole, or of a psum_scatter."""
    return lambda n: (n - 1) * torch.Size(shape).numel() * item / n


def both(*sizes: Size) -> Size:
    return lambda n: sum(size(n) for size in sizes)


# -- bags of a table's rows -----------------------------------------------------------------------

V, D, B = 480, 12, 12
TABLE, IDS = x(V, D), ids(V, 24)
ENDS = torch.tensor([0, 2, 2, 3, 7, 9, 9, 11, 12, 14, 19, 24])  # of bags of several sizes
ROWS, COLUMNS, SPLIT = P("a"), P(None, "a"), P("a")
OF_TABLE = V * D, 2 * V * D  # the table that a forward and a backward read, and its gradient
OF_IDS = (9 * 24 * D,) * 2  # rows that are looked up, masked and added: a rank reads all ids


def bags(
    mode: str, table: P, at: P, out: P, forward: Size, gradient: Size, ragged: bool = True, **how: Any
) -> Case:
    def fn(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        offsets = ENDS if ragged else torch.arange(0, 24, 2)
        return F.embedding_bag(ids, w, offsets, mode=mode)

    return Case(fn, (TABLE, IDS), (table, at), out, forward, gradient, **how)


def of_bags(mode: str) -> dict[str, Case]:
    # The backward of a maximum needs its place: values by max, places (int64) by min.
    places = both(reduced(B, D), reduced(B, D)) if mode == "max" else nothing
    return {
        # Each rank has its rows of every bag, the bags [B, D] are added up (or compared); the cotangent
        # is on all ranks, each keeps its rows'.
        f"{mode} of bags, rows": bags(
            mode, ROWS, P(), P(), reduced(B, D), places, every=OF_IDS
        ),
        # A column of a bag needs that column of the table alone.
        f"{mode} of bags, columns": bags(mode, COLUMNS, P(), COLUMNS, nothing, nothing),
        # A rank has its bags' ids; the table's gradient is a sum over all bags.
        f"{mode} of bags of one size": bags(
            mode, P(), SPLIT, SPLIT, nothing, reduced(V, D), ragged=False, every=OF_TABLE
        ),
        # Which ids are a rank's depends on values: it has all ids, and of the gradient all cotangents,
        # which are less than the table's gradient. The kernel, which cannot be split, runs on every rank.
        f"{mode} of bags of several sizes": bags(
            mode, P(), SPLIT, SPLIT, gathered(24), both(gathered(24), gathered(B, D)),
            every=OF_TABLE,
        ),
    }


# -- one window per rank --------------------------------------------------------------------------

IMAGE = P(None, None, None, "a")


def windows(fn: Fn, each: int, *kernel: int) -> Case:
    """Images of 12 windows side by side; the gradient of a replicated kernel is a sum over them."""
    args, specs = [x(2, 3, 4, 12 * each)], [IMAGE]
    if kernel:
        args, specs = [*args, x(*kernel)], [*specs, P()]
    return Case(fn, tuple(args), tuple(specs), IMAGE, nothing, reduced(*kernel) if kernel else nothing)


# -- selection, sorting, experts ------------------------------------------------------------------

SAMPLES, PICKED = x(B, 20, 6), ids(20, B, 4)
KEYS, SORTED = torch.randperm(24, generator=GENERATOR), (48, 48)  # every rank sorts keys and places
S, K, N, E = 24, 24, 48, 12
TOKENS, EXPERTS = x(S, K, dtype=torch.float32), x(E, K, N, dtype=torch.float32)
GROUPS = torch.tensor([0, 3, 5, 5, 8, 9, 13, 15, 16, 20, 21, 24], dtype=torch.int32)


def of_samples(fn: Fn) -> Case:
    """Each sample has its own table and ids: no rank needs another's."""
    return Case(fn, (SAMPLES, PICKED), (SPLIT, SPLIT), SPLIT, nothing, nothing)


def experts(tokens: P, weights: P, out: P, forward: Size, gradient: Size) -> Case:
    """Every rank has the begins of groups and, where the result is replicated, all of its cotangent."""

    def fn(t: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(t, w, offs=ends)

    args, every = (TOKENS, EXPERTS, GROUPS), (E, E + (S * N if out == P() else 0))
    return Case(fn, args, (tokens, weights, P()), out, forward, gradient, every)


CASES: dict[str, Case] = {
    **of_bags("sum"),
    **of_bags("mean"),
    **of_bags("max"),
    "convolution, one window": windows(lambda a, w: F.conv2d(a, w, stride=4), 4, 2, 3, 4, 4),
    "convolution, 1×1": windows(F.conv2d, 1, 2, 3, 1, 1),
    "transposed convolution": windows(
        lambda a, w: F.conv_transpose2d(a, w, stride=2), 1, 3, 2, 2, 2
    ),
    "mean pool": windows(lambda a: F.avg_pool2d(a, 4), 4),
    "max pool": windows(lambda a: F.max_pool2d(a, 4), 4),
    "e[t] of each sample": of_samples(vmap(lambda e, t: e[t])),
    "E[arange, t]": of_samples(lambda e, t: e[torch.arange(B)[:, None], t]),
    "embedding of each sample": of_samples(vmap(lambda e, t: F.embedding(t, e))),
    "index_select of each sample": of_samples(vmap(lambda e, t: e.index_select(0, t))),
    "gather of each sample": of_samples(lambda e, t: e.gather(1, t[..., None].expand(B, 4, 6))),
    # One element of each sample's row.
    "x[arange, i]": Case(
        lambda a, i: a[torch.arange(B), i],
        (x(B, 20), ids(20, B)),
        (SPLIT, SPLIT),
        SPLIT,
        nothing,
        nothing,
    ),
    # The table is everywhere; its gradient is a sum over the batch, however large the batch is.
    "w[i] over a split batch": Case(
        lambda w, i: w[i],
        (x(20, 6), ids(20, 240)),
        (P(), SPLIT),
        SPLIT,
        nothing,
        reduced(20, 6),
        every=(0, 20 * 6),
    ),
    # The permutation is computed on all ranks, of keys that all have; rows are permuted column by column.
    "x[i.argsort()], columns": Case(
        lambda a, i: a[i.argsort()],
        (x(24, 12), KEYS),
        (COLUMNS, P()),
        COLUMNS,
        nothing,
        nothing,
        every=SORTED,
    ),
    # The keys of all ranks are sorted.
    "x[i.argsort()], columns and keys": Case(
        lambda a, i: a[i.argsort()],
        (x(24, 12), KEYS),
        (COLUMNS, SPLIT),
        COLUMNS,
        gathered(24),
        gathered(24),
        every=SORTED,
    ),
    # A token stays with its rank, which has all experts; their gradient is a sum over tokens.
    "experts, tokens": experts(SPLIT, P(), SPLIT, nothing, reduced(E, K, N, item=4)),
    # Partial sums over features; the gradients need the cotangent, which all ranks have.
    "experts, features in": experts(COLUMNS, P(None, "a"), P(), reduced(S, N, item=4), nothing),
    # The transpose.
    "experts, features out": experts(
        P(), P(None, None, "a"), COLUMNS, nothing, reduced(S, K, item=4)
    ),
    # Every rank has the rows of its own experts; tokens, not weights, are added up.
    "experts, split": experts(P(), SPLIT, P(), reduced(S, N, item=4), reduced(S, K, item=4)),
}


def sent(plan: Sequence[Any]) -> int:
    return sum(c.bytes for c in plan)


def slope(case: Case) -> Fn:
    floats = tuple(i for i, a in enumerate(case.args) if a.is_floating_point())
    return grad(lambda *args: (case.fn(*args[:-1]) * args[-1]).sum(), floats)


FEW = 4  # shares that are rounded up, and a scalar


def beyond_share(program: Any, size: int) -> int:
    """FLOPs, or elements, of the busiest rank beside its share."""
    return int(program.work.rank_flops - -(-program.work.flops // size)) - FEW


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_what_an_expert_sends(name: str, size: int) -> None:
    case, mesh = CASES[name], Mesh({"a": size}, virtual=True)
    run = shard(case.fn, mesh, case.specs, case.out)
    program = run.lower(*case.args)
    assert sent(program.collectives) == case.forward(size), program.collectives
    out = case.fn(*case.args)
    torch.testing.assert_close(whole(run(*case.args)), out, rtol=1e-15, atol=0)
    assert beyond_share(program, size) <= case.every[0]
    prove(program)

    args = (*case.args, x(*out.shape, dtype=out.dtype))
    of_floats = tuple(s for a, s in zip(case.args, case.specs, strict=True) if a.is_floating_point())
    run = shard(slope(case), mesh, (*case.specs, case.out), of_floats)
    program = run.lower(*args)
    assert sent(program.collectives) == case.gradient(size), program.collectives
    for have, want in zip(run(*args), slope(case)(*args), strict=True):
        torch.testing.assert_close(whole(have), want, rtol=1e-15, atol=0)
    assert beyond_share(program, size) <= case.every[1]
    prove(program)


@pytest.mark.parametrize("size", [2, 3])
def test_one_of_several_values_for_a_place_counts(size: int) -> None:
    """Values that are scattered into zeros replace each other; they are not added up over ranks."""
    values, places = x(12, 6), ids(4, 12, 6)
    mesh = Mesh({"a": size}, virtual=True)
    for dim, spec in ((1, P(None, "a")), (0, P("a")), (1, P("a"))):

        def fn(values: torch.Tensor, places: torch.Tensor, dim: int = dim) -> torch.Tensor:
            shape = (12, 4) if dim else (4, 6)
            return torch.zeros(shape, dtype=values.dtype).scatter(dim, places, values)

        run = shard(fn, mesh, (spec, spec))
        assert torch.equal(whole(run(values, places)), fn(values, places))
        prove(run.lower(values, places))

    def of_sums(values: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.zeros(12, 6, dtype=values.dtype).scatter(1, values.argsort(1)[:, :5], values @ w)

    w = x(6, 5)
    run = shard(of_sums, mesh, (P(None, "a"), P("a")))  # each rank scatters its part of the sums
    assert torch.equal(whole(run(values, w)), of_sums(values, w))
    prove(run.lower(values, w))
