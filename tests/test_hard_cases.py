"""Operations over a split dim: right, and moving no more than an expert's code would.

A case counts elements that are reduced or gathered in the forward: ``rows`` is the product of the dims
that are not split. Values and gradients are one device's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole

from torchard import Mesh, P, nn, place, random, shard

WIDTH = 12
ROWS = 6


Limit = int | Callable[[int], int]


@dataclass(frozen=True)
class Case:
    """``limit``: elements that may cross the network in the forward, perhaps by the number of ranks."""

    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    specs: tuple[P, ...]
    limit: Limit
    received: bool = False  # the limit is of elements that a rank did not have


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


def of_columns(fn: Callable[..., Any], limit: Limit, *rest: torch.Tensor) -> Case:
    """A case of a table split by columns; the other arguments are replicated."""
    return Case(fn, (TABLE, *rest), (COLUMNS, *[P()] * len(rest)), limit)


def normed(fn: Callable[..., Any]) -> Case:
    vectors = (x(WIDTH), x(WIDTH) + 1)
    return Case(fn, (TABLE, *vectors), (COLUMNS, P("tp"), P("tp")), 2 * ROWS)


def group_norm(groups: int, spec: P, limit: int) -> Case:
    channels = P("tp") if spec == P(None, "tp") else P()
    args = (x(4, WIDTH, 8), x(WIDTH), x(WIDTH))
    return Case(lambda a, w, b: F.group_norm(a, groups, w, b), args, (spec, channels, channels), limit)


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


def convolution(specs: tuple[P, P, P], limit: int, groups: int = 1) -> Case:
    args = (x(6, 12, 10), x(12, 12 // groups, 3), x(12))
    return Case(lambda a, w, b: F.conv1d(a, w, b, padding=1, groups=groups), args, specs, limit)


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
    """An image of 12 lines, split: ``lines`` may be lent to a rank."""
    shape, spec = ((2, 3, 12, 4), P(None, None, "tp")) if square else ((2, 3, 12), SEQUENCE)
    return Case(fn, (x(*shape),), (spec,), lines * math.prod(shape) // 12)


KERNEL = x(3, 3, 3)


def two_lookups(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Twice, and tied with the output."""
    return (F.embedding(at, w) + F.embedding(at.flip(0), w)) @ w.mT


HEADS, SEQUENCE = P(None, "tp"), P(None, None, "tp")
CASES = {
    "mean": of_columns(lambda a: a.mean(1), ROWS),
    "variance": of_columns(lambda a: a.var(1), 2 * ROWS),
    "layer_norm": normed(lambda a, w, b: F.layer_norm(a, (WIDTH,), w, b)),
    "rms_norm": normed(lambda a, w, b: F.rms_norm(a, (WIDTH,), w) + b),
    "group_norm": group_norm(12, P(None, "tp"), 0),
    "group_norm cut inside a group": group_norm(3, P(None, "tp"), 2 * 4 * 8),
    "group_norm of a split image": group_norm(3, P(None, None, "tp"), 2 * 4 * WIDTH),
    "amax": of_columns(lambda a: a.amax(1), 2 * ROWS),
    "argmax": of_columns(lambda a: a.argmax(1), 2 * ROWS),
    "argmin of ties": Case(lambda a: a.argmin(1), (TIES,), (COLUMNS,), 2 * ROWS),
    "max with place, NaN": Case(lambda a: a.max(1), (holes(),), (COLUMNS,), 2 * ROWS),
    "min with place, ties": Case(lambda a: a.min(1), (TIES,), (COLUMNS,), 2 * ROWS),
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
    ),
    "embedding": Case(
        lambda w, at: F.embedding(at, w), (x(WIDTH, 4), PICKED), (P("tp"), P()), ROWS * 4
    ),
    "embedding, twice and tied": Case(
        two_lookups, (x(WIDTH, 4), PICKED), (P("tp"), P()), 2 * ROWS * 4
    ),
    "gather": of_columns(lambda a, t: a.gather(1, t[:, None]), ROWS, PICKED),
    "index_select": of_columns(lambda a, t: a.index_select(1, t), ROWS * ROWS, PICKED),
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
    "attention, sequence": attention(
        SEQUENCE, 2 * 2 * 2 * WIDTH * 4, heads=2, groups=2, batch=2, is_causal=True
    ),
    "convolution, batch": convolution((P("tp"), P(), P()), 0),
    "convolution, channels out": convolution((P(), P("tp"), P("tp")), 0),
    "convolution, channels in": convolution((P(None, "tp"), P(None, "tp"), P()), 6 * 12 * 10),
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
    "topk": of_columns(lambda a: a.topk(2, 1), lambda size: 2 * size * 2 * ROWS),
    "least of k": of_columns(lambda a: a.topk(2, 1, largest=False), lambda size: 2 * size * 2 * ROWS),
    "cumsum": of_columns(lambda a: a.cumsum(1), lambda size: size * ROWS),
    "slice": moving(lambda a: a[:, 3:10]),
    "slice with a step": moving(lambda a: a[:, 1::2]),
    "pad": moving(lambda a: F.pad(a, (2, 1), value=-1)),
    "roll": moving(lambda a: a.roll(5, 1)),
    "flip": moving(lambda a: a.flip(1)),
    "cat": Case(
        lambda a: torch.cat([a, a[:, :0], a.cos()], 1),
        (TABLE,),
        (COLUMNS,),
        lambda size: sum(
            changing(lambda i, front=front: F.pad(i, (front, WIDTH - front), value=-1))(size)
            for front in (0, WIDTH)
        ),
        received=True,
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


def slope(fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A scalar of what a function gives, with a gradient that differs from place to place."""

    def scalar(*args: torch.Tensor) -> torch.Tensor:
        out = fn(*args)
        values = out[0] if isinstance(out, tuple) else out
        return (values.sin() * torch.arange(values.numel()).reshape(values.shape)).sum()

    return scalar


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_hard_case(name: str, size: int) -> None:
    case = CASES[name]
    mesh = Mesh({"tp": size}, virtual=True)
    placed = [place(a, mesh, s) for a, s in zip(case.args, case.specs, strict=True)]
    run = shard(case.fn, mesh)
    plan = run.lower(*placed).collectives
    limit = case.limit if isinstance(case.limit, int) else case.limit(size)
    assert moved(plan, size, case.received) <= limit, f"more than {limit}: {plan}"
    compare(run(*placed), case.fn(*case.args))
    if not name.startswith("arg"):
        argnums = tuple(i for i, a in enumerate(case.args) if a.is_floating_point())
        have = shard(torch.func.grad(slope(case.fn), argnums), mesh)(*placed)
        compare(have, torch.func.grad(slope(case.fn), argnums)(*case.args))


def compare(have: Any, want: Any) -> None:
    have, want = (v if isinstance(v, tuple) else (v,) for v in (have, want))
    for a, b in zip(have, want, strict=True):
        largest = float(b.nan_to_num(0, 0, 0).abs().max()) if b.is_floating_point() else 0.0
        torch.testing.assert_close(whole(a), b, rtol=0, atol=1e-12 * largest, equal_nan=True)
