"""Operations over a split dim: right, moving no more than an expert's code would, the work split.

A case counts elements that are reduced or gathered in the forward: ``rows`` is the product of the dims
that are not split. Values and gradients are one device's. The busiest rank has its share of the work,
forward and gradient: FLOPs of one device's products, and elements of the plan's other operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import work
from effort import cases
from seeds import whole

from torchard import Mesh, P, nn, place, random, shard
from torchard.functional.programs.program import Program

WIDTH = 48  # so large that statistics, of which every rank has all, are few beside it
ROWS = 6


Limit = int | Callable[[int], int]


@dataclass(frozen=True)
class Case:
    """Limits are numbers, perhaps by the number of ranks.

    Attributes:
        limit: elements that may cross the network in the forward.
        received: the limit is of elements that a rank did not have.
        all_have: elements of the largest value that no spec splits, statistics or a reduced result;
            operations on so few are done by every rank, and are not counted.
        lent: lines of an image that a rank reads besides its own; their gradients are products, too.
        more: elements of a rank's operations of which one device has no need, in the forward and in
            the gradient's program.
        gathers: numbers of ranks for which the gradient is not split.
    """

    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    specs: tuple[P, ...]
    limit: Limit
    received: bool = False
    all_have: Limit = ROWS
    lent: int = 0
    more: tuple[Limit, Limit] = (0, 0)
    gathers: tuple[int, ...] = ()


def x(*shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(*shape, generator=made, dtype=torch.float64)


def ids(size: int, *shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(math.prod(shape))
    return torch.randint(0, size, shape, generator=made)


TABLE, COLUMNS = x(ROWS, WIDTH), P(None, "tp")
PICKED = ids(WIDTH, ROWS)
IGNORED = torch.where(torch.arange(ROWS) == 2, -100, PICKED)
TIES = TABLE.round()


def holes() -> torch.Tensor:
    """NaN in one row, minus infinity throughout another."""
    y = TABLE.clone()
    y[1, 4], y[3] = math.nan, -math.inf
    return y


def of_columns(fn: Callable[..., Any], limit: Limit, *rest: torch.Tensor, **how: Any) -> Case:
    """A case of a table split by columns; the other arguments are replicated."""
    return Case(fn, (TABLE, *rest), (COLUMNS, *[P()] * len(rest)), limit, **how)


def lengthened(size: int) -> int:
    """A table with a place for what is written to other ranks' columns, twice: made and written to.

    Where writes do not add up. One device's table is made once less.
    """
    return ROWS * (-(-WIDTH // size) + 2)


def normed(fn: Callable[..., Any]) -> Case:
    vectors = (x(WIDTH), x(WIDTH) + 1)
    return Case(fn, (TABLE, *vectors), (COLUMNS, P("tp"), P("tp")), 2 * ROWS)


def group_norm(groups: int, spec: P, limit: int, **how: Any) -> Case:
    channels = P("tp") if spec == P(None, "tp") else P()
    args, specs = (x(4, WIDTH, 8), x(WIDTH), x(WIDTH)), (spec, channels, channels)
    return Case(lambda a, w, b: F.group_norm(a, groups, w, b), args, specs, limit, **how)


def entropy(limit: int, target: torch.Tensor = PICKED, **options: Any) -> Case:
    return of_columns(lambda a, t: F.cross_entropy(a, t, **options), limit, target)


def attention(
    spec: P, limit: int, heads: int = 6, groups: int = 6, batch: int = 6, **options: Any
) -> Case:
    shapes = (batch, heads, WIDTH, 4), (batch, groups, WIDTH, 4), (batch, groups, WIDTH, 4)
    grouped = heads != groups

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)

    return Case(fn, tuple(x(*s) for s in shapes), (spec,) * 3, limit)


def rows_of_mask(size: int) -> int:
    """Of a causal mask, [queries, keys], where a rank has queries: compared, and filled."""
    return 2 * -(-WIDTH // size) * WIDTH


def convolution(specs: tuple[P, P, P], limit: int, groups: int = 1, **how: Any) -> Case:
    args = (x(6, 12, 10), x(12, 12 // groups, 3), x(12))
    return Case(lambda a, w, b: F.conv1d(a, w, b, padding=1, groups=groups), args, specs, limit, **how)


def changing(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], int]:
    """Elements that change rank where columns are moved: of the rank that sends or receives most.

    Args:
        move: of [1, WIDTH], filling with -1.
    """

    def limit(size: int) -> int:
        (origin,) = move(torch.arange(WIDTH)[None]).tolist()
        here, there = -(-WIDTH // size), -(-len(origin) // size)
        crossing = [(at // there, i // here) for at, i in enumerate(origin) if i >= 0]
        received = [sum(to == r != source for to, source in crossing) for r in range(size)]
        sent = [sum(source == r != to for to, source in crossing) for r in range(size)]
        return max(received + sent) * ROWS

    return limit


def moving(move: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    return replace(of_columns(move, changing(move)), received=True)


def image(fn: Callable[[torch.Tensor], torch.Tensor], lines: int, *, square: bool = False) -> Case:
    """An image of WIDTH lines, split: ``lines`` may be lent to a rank."""
    shape, spec = ((2, 3, WIDTH, 4), P(None, None, "tp")) if square else ((2, 3, WIDTH), SEQUENCE)
    return Case(fn, (x(*shape),), (spec,), lines * math.prod(shape) // WIDTH, lent=lines)


KERNEL = x(3, 3, 3)


def two_lookups(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Twice, and tied with the output."""
    return (F.embedding(at, w) + F.embedding(at.flip(0), w)) @ w.mT


def best(**how: bool) -> Case:
    """The best of each rank's best, of which every rank has all."""

    def merged(size: int) -> int:
        return size * 2 * ROWS

    return of_columns(
        lambda a: a.topk(2, 1, **how),
        lambda size: 2 * merged(size),
        all_have=merged,
        more=(0, lengthened),
    )


def looked_up(fn: Callable[..., Any], limit: int) -> Case:
    return Case(fn, (x(WIDTH, 4), PICKED), (P("tp"), P()), limit, all_have=ROWS * 4)


HEADS, SEQUENCE = P(None, "tp"), P(None, None, "tp")
CASES = {
    "mean": of_columns(lambda a: a.mean(1), ROWS),
    "variance": of_columns(lambda a: a.var(1), 2 * ROWS),
    "layer_norm": normed(lambda a, w, b: F.layer_norm(a, (WIDTH,), w, b)),
    "rms_norm": normed(lambda a, w, b: F.rms_norm(a, (WIDTH,), w) + b),
    "group_norm": group_norm(12, P(None, "tp"), 0),
    # Where grad is recorded, torch's derivative views channels as [groups, rest], which the cut misses.
    "group_norm cut inside a group": group_norm(
        3, P(None, "tp"), 2 * 4 * 8, all_have=4 * 3, gathers=(2, 4)
    ),
    "group_norm of a split image": group_norm(
        3,
        P(None, None, "tp"),
        2 * 4 * WIDTH,
        all_have=4 * WIDTH,
        more=(4 * 4 * WIDTH * 3,) * 2,  # twice, sums of channels masked and summed: [4, WIDTH, 3]
    ),
    "amax": of_columns(lambda a: a.amax(1), 2 * ROWS),
    "argmax": of_columns(lambda a: a.argmax(1), 2 * ROWS),
    "argmin of ties": Case(lambda a: a.argmin(1), (TIES,), (COLUMNS,), 2 * ROWS),
    "max with place, NaN": Case(
        lambda a: a.max(1), (holes(),), (COLUMNS,), 2 * ROWS, more=(0, lengthened)
    ),
    "min with place, ties": Case(
        lambda a: a.min(1), (TIES,), (COLUMNS,), 2 * ROWS, more=(0, lengthened)
    ),
    "softmax": of_columns(lambda a: a.softmax(1), 2 * ROWS),
    "logsumexp": of_columns(lambda a: a.logsumexp(1), 2 * ROWS),
    "cross-entropy": entropy(3 * ROWS),
    "cross-entropy, ignored rows": entropy(3 * ROWS, IGNORED),
    "cross-entropy, smoothed": entropy(4 * ROWS, label_smoothing=0.1),
    "cross-entropy, weighted": Case(
        lambda a, t, w: F.cross_entropy(a, t, w.detach()),
        (TABLE, PICKED, x(WIDTH).abs()),
        (COLUMNS, P(), P()),
        3 * ROWS,
        all_have=WIDTH,
    ),
    "embedding": looked_up(lambda w, at: F.embedding(at, w), ROWS * 4),
    "embedding, twice and tied": looked_up(two_lookups, 2 * ROWS * 4),
    "gather": of_columns(lambda a, t: a.gather(1, t[:, None]), ROWS, PICKED),
    "index_select": of_columns(
        lambda a, t: a.index_select(1, t), ROWS * ROWS, PICKED, all_have=ROWS * ROWS
    ),
    "one of each row": of_columns(lambda a, t: a[torch.arange(ROWS), t], ROWS, PICKED),
    "scatter_add": of_columns(
        lambda a, t, s: a.scatter_add(1, t[:, None], s), 0, PICKED, x(ROWS, 1)
    ),
    "index_put": of_columns(
        lambda a, t, s: a.index_put((torch.arange(ROWS), t), s, accumulate=True), 0, PICKED, x(ROWS)
    ),
    "attention, heads": attention(HEADS, 0, is_causal=True),
    "attention, batch": attention(P("tp"), 0, is_causal=True),
    "attention, groups of heads": attention(HEADS, 0, heads=24, groups=12),
    "attention, sequence": replace(
        attention(SEQUENCE, 2 * 2 * 2 * WIDTH * 4, heads=2, groups=2, batch=2, is_causal=True),
        all_have=WIDTH,
        more=(rows_of_mask, lambda size: 2 * rows_of_mask(size)),
    ),
    "convolution, batch": convolution((P("tp"), P(), P()), 0),
    "convolution, channels out": convolution((P(), P("tp"), P("tp")), 0),
    "convolution, channels in": convolution(
        (P(None, "tp"), P(None, "tp"), P()), 6 * 12 * 10, all_have=6 * 12 * 10
    ),
    "convolution, groups": convolution((P(None, "tp"), P("tp"), P("tp")), 0, groups=12),
    "convolution, image": image(lambda a: F.conv1d(a, KERNEL, padding=1), 2),
    "convolution, image in 2-d": image(
        lambda a: F.conv2d(a, KERNEL[..., None], padding=(1, 0)), 2, square=True
    ),
    "convolution, dilated": image(lambda a: F.conv1d(a, KERNEL, padding=2, dilation=2), 4),
    "max pool, image": image(lambda a: F.max_pool1d(a, 3, 1, padding=1), 2),
    "max pool, image in 2-d": image(lambda a: F.max_pool2d(a, 3, 1, padding=1), 2, square=True),
    "mean pool, image": image(lambda a: F.avg_pool1d(a, 3, 1, padding=1), 2),
    "interpolation, nearest": image(lambda a: F.interpolate(a, scale_factor=2), 0, square=True),
    "interpolation, bilinear": image(
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), 2, square=True
    ),
    "topk": best(largest=True),
    "least of k": best(largest=False),
    # Of the gradient two flips, of which each sends all there is; a gather sends it once.
    "cumsum": of_columns(
        lambda a: a.cumsum(1), lambda size: size * ROWS, all_have=lambda size: size * ROWS
    ),
    "slice": moving(lambda a: a[:, 3:10]),
    "slice with a step": moving(lambda a: a[:, 1::2]),
    "pad": replace(
        moving(lambda a: F.pad(a, (2, 1), value=-1)),
        more=(0, lambda size: ROWS * -(-(WIDTH + 3) // size)),  # the last block, filled up
    ),
    "roll": moving(lambda a: a.roll(5, 1)),
    # One gather of half is no more than one exchange of half, forward, and one less with the gradient.
    "flip": replace(moving(lambda a: a.flip(1)), gathers=(2,)),
    "cat": Case(
        lambda a: torch.cat([a, a[:, :0], a.cos()], 1),
        (TABLE,),
        (COLUMNS,),
        lambda size: sum(
            changing(lambda i, front=front: F.pad(i, (front, WIDTH - front), value=-1))(size)
            for front in (0, WIDTH)
        ),
        received=True,
        more=(0, lambda size: -(-ROWS * 2 * WIDTH // size)),  # its part of the weights, in two pieces
    ),
    "pooling, batch": Case(lambda a: F.max_pool1d(a, 2), (x(6, 4, 10),), (P("tp"),), 0),
    "merge of a split dim": Case(lambda a: a.reshape(-1), (TABLE,), (P("tp"),), 0),
    "dropout": of_columns(lambda a: nn.dropout(random.key(3), a, 0.5), 0),
}


def moved(plan: Any, size: int, received: bool) -> int:
    """Elements a rank's value has where it is reduced, or has become where it is gathered."""
    copies = {"all_gather": size - 1 if received else size}
    return sum(
        math.prod(c.shape) * copies.get(c.kind, 1) for c in plan if c.phase == "forward"
    )


def slope(case: Case) -> Callable[..., torch.Tensor]:
    """A scalar of what a function gives, with a gradient that differs from place to place."""
    (out, *_) = results(case.fn(*case.args))
    weights = torch.arange(out.numel(), dtype=torch.float64).reshape(out.shape)

    def scalar(*args: torch.Tensor) -> torch.Tensor:
        (values, *_) = results(case.fn(*args))
        return (values.sin() * weights).sum()

    return scalar


def results(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def for_size(limit: Limit, size: int) -> int:
    return limit if isinstance(limit, int) else limit(size)


def share(case: Case, size: int, lent: int = 0) -> Fraction:
    """The part of a split dim that the busiest rank has; with what neighbours lend it."""
    return max(
        Fraction(-(-n // size) + lent, n)
        for a, spec in zip(case.args, case.specs, strict=True)
        for n, axes in zip(a.shape, spec.entries, strict=False)
        if axes
    )


def beyond_share(
    case: Case, mesh: Mesh, fn: Callable[..., Any], program: Program, gradient: bool
) -> str:
    """What the busiest rank computes beyond its share, in words; nothing if the work is split."""
    size, few = mesh.size, for_size(case.all_have, mesh.size)
    ranks, device = work.of_ranks(program, mesh), work.of_device(program)
    flops = max(r.flops for r in ranks), work.flops_of(fn, *case.args)
    elements = max(r.above(few) for r in ranks), device.above(few)
    more = for_size(case.more[gradient], size)
    if flops[0] > share(case, size, case.lent * gradient) * flops[1]:
        return f"{flops[0]} of {flops[1]} FLOPs"
    if elements[0] > share(case, size) * elements[1] + more:
        return f"{elements[0]} of {elements[1]} elements, where it may have {more} of its own"
    return ""


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("size", cases([2, 3], [4]))
@pytest.mark.parametrize("name", CASES)
def test_hard_case(name: str, size: int) -> None:
    case = CASES[name]
    mesh = Mesh({"tp": size}, virtual=True)
    placed = [place(a, mesh, s) for a, s in zip(case.args, case.specs, strict=True)]
    run = shard(case.fn, mesh)
    program = run.lower(*placed)
    plan, limit = program.collectives, for_size(case.limit, size)
    assert moved(plan, size, case.received) <= limit, f"more than {limit}: {plan}"
    assert not beyond_share(case, mesh, case.fn, program, False)
    compare(run(*placed), case.fn(*case.args))
    if not name.startswith("arg"):
        argnums = tuple(i for i, a in enumerate(case.args) if a.is_floating_point())
        gradient = torch.func.grad(slope(case), argnums)
        run = shard(gradient, mesh)
        beyond = beyond_share(case, mesh, gradient, run.lower(*placed), True)
        assert bool(beyond) == (size in case.gathers), beyond or "split, where the row says gathered"
        compare(run(*placed), gradient(*case.args))


def compare(have: Any, want: Any) -> None:
    for a, b in zip(results(have), results(want), strict=True):
        largest = float(b.nan_to_num(0, 0, 0).abs().max()) if b.is_floating_point() else 0.0
        torch.testing.assert_close(whole(a), b, rtol=0, atol=1e-12 * largest, equal_nan=True)
