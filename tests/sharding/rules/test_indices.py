"""Rows, slices, triangles, diagonals and halves of a split dim: what they send, and that they are right.

A case says what an expert's code would send over the network, in bytes: in the forward, and in all of a
program with the gradient. Values and gradients are one device's, in float64, for dims that the ranks
divide evenly and for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import Mesh, P, place, shard

ITEM, WIDTH = 8, 6  # bytes of an element, elements of a row

Bytes = Callable[[int, int], float]  # of the length of the dim, and the number of ranks


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def table(n: int) -> tuple[torch.Tensor, ...]:
    return (random(n, WIDTH),)


def sequence(n: int) -> tuple[torch.Tensor, ...]:
    return (random(2, n, WIDTH),)


def square(n: int) -> tuple[torch.Tensor, ...]:
    return (random(n, n),)


def wide(n: int) -> tuple[torch.Tensor, ...]:
    return (random(n, n + 5),)


def system(n: int) -> tuple[torch.Tensor, ...]:
    """A well conditioned matrix, and right-hand sides."""
    return random(8, 8) + 9 * torch.eye(8, dtype=torch.float64), random(8, n)


ROWS, COLUMNS = (P("tp"),), (P(None, "tp"),)


def nothing(n: int, k: int) -> float:
    return 0


def summed(elements: Callable[[int], int]) -> Bytes:
    """An all_reduce of so many elements."""
    return lambda n, k: math.ceil(2 * elements(n) * ITEM * (k - 1) / k)


def gathered(elements: Callable[[int], int]) -> Bytes:
    """An all_gather of so many elements a row."""
    return lambda n, k: -(-n // k) * (k - 1) * elements(n) * ITEM


def exchanged(pieces: Callable[[int], list[list[int]]], width: int = WIDTH) -> Bytes:
    """What the rank that sends or receives most does: rows of an input that make up each result.

    Args:
        pieces: for the length of the dim, for each result: the rows, in a numbering of all inputs, of
            which each is as long as the dim.
    """

    def limit(n: int, k: int) -> float:
        each = -(-n // k)
        sent, received = [0] * k, [0] * k
        for rows in pieces(n):
            block = -(-len(rows) // k)
            for at, row in enumerate(rows):
                source, target = row % n // each, at // block
                if source != target:
                    sent[source] += 1
                    received[target] += 1
        return max(sent + received) * width * ITEM

    return limit


def both(one: Bytes, *others: Bytes) -> Bytes:
    return lambda n, k: sum(f(n, k) for f in (one, *others))


@dataclass(frozen=True)
class Case:
    """A function, its arguments for a length of the split dim, and what an expert would send."""

    fn: Callable[..., Any]
    args: Callable[[int], tuple[torch.Tensor, ...]]
    specs: tuple[P, ...]
    forward: Bytes
    step: Bytes


def case(
    fn: Callable[..., Any],
    args: Callable[[int], tuple[torch.Tensor, ...]],
    forward: Bytes,
    step: Bytes | None = None,
    specs: tuple[P, ...] = ROWS,
) -> Case:
    return Case(fn, args, specs, forward, forward if step is None else step)


def written(write: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that writes to its argument, made pure."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        write(y)
        return y

    return fn


def put(place: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return written(lambda y: y.__setitem__(place, value))


def shifted(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y[1:] = x[:-1] * 2
    return y


def halves(n: int) -> list[list[int]]:
    return [list(range(-(-n // 2))), list(range(-(-n // 2), n))]


ROW, TWO_ROWS = summed(lambda n: WIDTH), summed(lambda n: 2 * WIDTH)
TWICE = exchanged(lambda n: [list(range(2 * n))])
HALVES = exchanged(halves)

CASES = {
    "first of a sequence": case(lambda h: h[:, 0], sequence, TWO_ROWS, specs=COLUMNS),
    "last of a sequence": case(lambda h: h[:, -1], sequence, TWO_ROWS, specs=COLUMNS),
    "row of a table": case(lambda x: x[3], table, ROW),
    "one of unbind": case(lambda x: x.unbind(0)[-2], table, ROW),
    "two of unbind": case(lambda x: x.unbind(0)[1] * x.unbind(0)[-2], table, both(ROW, ROW)),
    "a loop that adds rows up": case(lambda x: sum(row for row in x), table, ROW),
    "a loop over rows": case(
        lambda x: sum(row.sin() for row in x), table, gathered(lambda n: WIDTH)
    ),
    "a loop over indices": case(
        lambda x: sum(x[i].sin() for i in range(x.shape[0])), table, gathered(lambda n: WIDTH)
    ),
    "stack": case(lambda x: torch.stack([x.sum(0), x[0]]), table, both(ROW, ROW)),
    "tril": case(lambda m: m.tril(), square, nothing),
    "tril, columns": case(lambda m: m.tril(-2), square, nothing, specs=COLUMNS),
    "triu": case(lambda m: m.triu(1), wide, nothing),
    "triu of a batch": case(
        lambda h: (h.mT @ h).triu() * h.sum(),
        lambda n: (random(n, 3, 4),),
        summed(lambda n: 1),
        both(*[summed(lambda n: 1)] * 2),
    ),
    "causal mask": case(
        lambda m: m.masked_fill(torch.ones_like(m).tril() == 0, -1.0), square, nothing
    ),
    "diagonal": case(lambda m: m.diagonal(), square, nothing),
    "diagonal above": case(lambda m: m.diagonal(3), wide, nothing),
    "diagonal below": case(lambda m: m.diagonal(-2), square, summed(lambda n: n - 2)),
    "diagonal, columns": case(lambda m: m.diagonal(), square, summed(lambda n: n), specs=COLUMNS),
    "trace": case(lambda m: m.trace(), square, summed(lambda n: 1)),
    "diag_embed": case(lambda x: torch.diag_embed(x), lambda n: (random(n),), nothing),
    "diagonal, filled": case(written(lambda y: y.fill_diagonal_(0.5)), square, nothing),
    "diagonal, written": case(
        written(lambda y: y.diagonal().mul_(0)), square, nothing
    ),
    "row, written": case(put(3, 1.5), table, nothing),
    "column of a sequence, written": case(
        put((slice(None), -1), 0.5), sequence, nothing, specs=COLUMNS
    ),
    "slice, written": case(put(slice(2, 9), 0.5), table, nothing),
    "slice with a step, written": case(put(slice(1, None, 3), 0.5), table, nothing),
    "slice, written from the next": case(
        shifted, table, lambda n, k: 2 * WIDTH * ITEM, lambda n, k: 5 * WIDTH * ITEM
    ),
    "unfold": case(
        lambda x: x.unfold(0, 3, 1),
        table,
        lambda n, k: 2 * WIDTH * ITEM + exchanged(lambda n: [list(range(n - 2))])(n, k),
        lambda n, k: 8 * 2 * WIDTH * ITEM + 4 * exchanged(lambda n: [list(range(n - 2))])(n, k),
    ),
    "unfold with gaps": case(lambda x: x.unfold(0, 1, 2), table, gathered(lambda n: WIDTH)),
    "split by sizes": case(
        lambda x: x.split([3, x.shape[0] - 3]),
        table,
        exchanged(lambda n: [[0, 1, 2], list(range(3, n))]),
        both(*[exchanged(lambda n: [[0, 1, 2], list(range(3, n))])] * 2),
    ),
    "one of split by sizes": case(
        lambda x: x.split([3, x.shape[0] - 3])[0],
        table,
        exchanged(lambda n: [[0, 1, 2]]),
        both(exchanged(lambda n: [[0, 1, 2]]), lambda n, k: 4 * WIDTH * ITEM),
    ),
    "chunk": case(lambda x: x.chunk(2), table, HALVES, both(HALVES, HALVES)),
    "slices": case(
        lambda x: (x[:5], x[5:]),
        table,
        exchanged(lambda n: [[*range(5)], [*range(5, n)]]),
        gathered(lambda n: WIDTH),  # what is moved there and back, each piece of its own
    ),
    "cat": case(lambda x: torch.cat([x, x.sin()]), table, TWICE, both(TWICE, TWICE)),
    "solve": case(
        torch.linalg.solve, system, nothing, summed(lambda n: 64), specs=(P(), P(None, "tp"))
    ),
    "triangular solve": case(
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        system,
        nothing,
        summed(lambda n: 64),
        specs=(P(), P(None, "tp")),
    ),
}
# Into a result that is split as the argument is.
ASKED = {"cat", "chunk", "slices", "split by sizes", "one of split by sizes", "glu"}
CASES["glu"] = case(
    lambda x: F.glu(x, 0), lambda n: (random(n + n % 2, WIDTH),), HALVES, both(*[HALVES] * 4)
)


def results(out: Any) -> tuple[torch.Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def slope(fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A scalar of what a function gives, with a gradient that differs from place to place."""

    def scalar(*args: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for value in results(fn(*args)):
            weights = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape)
            total = total + (value.sin() * weights).sum()
        return total

    return scalar


def whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full() if hasattr(value, "full") else value
    return full


def compare(have: Any, want: Any) -> None:
    for one, other in zip(results(have), results(want), strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-11, atol=1e-11)


def sent(program: Any) -> int:
    return sum(c.bytes for c in program.collectives)


# By default each case on one of these, in turn; `make explore` takes all.
MESHES = [(length, size) for size in (4, 3, 2) for length in (48, 50)]
DRAWN = [
    (name, *at)
    for i, name in enumerate(CASES)
    for at in MESHES[i % 4 : i % 4 + 1] + examples(0, 1) * [m for m in MESHES if m != MESHES[i % 4]]
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "length", "size"), DRAWN)
def test_bytes_and_values(name: str, length: int, size: int) -> None:
    found = CASES[name]
    mesh = Mesh({"tp": size}, virtual=True)
    args = found.args(length)
    placed = [place(a, mesh, s) for a, s in zip(args, found.specs, strict=True)]
    run = shard(found.fn, mesh, out_specs=P("tp") if name in ASKED else None)
    plan = run.lower(*placed)
    assert sent(plan) <= found.forward(length, size), plan.collectives
    compare(run(*placed), found.fn(*args))
    gradient = torch.func.grad(slope(found.fn), tuple(range(len(args))))
    step = shard(gradient, mesh, out_specs=found.specs)
    compare(step(*placed), gradient(*args))
    plan = step.lower(*placed)
    assert sent(plan) <= found.step(length, size), plan.collectives


# -- programs of them ------------------------------------------------------------------------------

Step = Callable[[torch.Tensor, int, int], torch.Tensor]


def _at(x: torch.Tensor, i: int) -> int:
    return i % x.shape[0]


# Each takes and gives a matrix, with two numbers to choose by.
STEPS: dict[str, Step] = {
    "row": lambda x, i, j: x[_at(x, i)] + x,
    "column": lambda x, i, j: x * x[:, j % x.shape[1], None],
    "rows": lambda x, i, j: torch.stack([x[_at(x, i)], x[_at(x, j)], x[_at(x, i)]]),
    "some of unbind": lambda x, i, j: torch.stack([*x.unbind(0)[_at(x, i) :], x.sum(0)]),
    "tril": lambda x, i, j: x.tril(i - j),
    "triu": lambda x, i, j: x.triu(i - j),
    "diagonal": lambda x, i, j: x + x.diagonal(min(i, x.shape[1] - 1)).sum(),
    "embedded": lambda x, i, j: torch.diag_embed(x[:, 0], i - 3)[:, : max(j, 1)],
    "filled": lambda x, i, j: x.clone().fill_diagonal_(0.5 + i),
    "row, written": lambda x, i, j: x.select_scatter(x.sum(0), 0, _at(x, i)),
    "rows, written": lambda x, i, j: _write(x, slice(i % x.shape[0], None, 1 + j % 3), 0.25),
    "diagonal, written": lambda x, i, j: x.diagonal_scatter(torch.zeros_like(x.diagonal())),
    "column, written": lambda x, i, j: _write(x, (slice(None), j % x.shape[1]), 0.75),
    "from others": lambda x, i, j: _copy(x, 1 + _at(x, i)),
    "split": lambda x, i, j: torch.cat(x.split([_at(x, i), x.shape[0] - _at(x, i)])[::-1]),
    "cat": lambda x, i, j: torch.cat([x[: 1 + _at(x, i)], x]),
    "glu": lambda x, i, j: F.glu(torch.cat([x, x + 1]), 0),
    "windows": lambda x, i, j: x.unfold(0, 1 + _at(x, i) % 4, 1 + j % 3).sum(-1),
    "transposed": lambda x, i, j: x.mT,
    "sine": lambda x, i, j: x.sin(),
}


def _write(x: torch.Tensor, where: Any, value: float) -> torch.Tensor:
    y = x.clone()
    y[where] = value
    return y


def _copy(x: torch.Tensor, by: int) -> torch.Tensor:
    y = x.clone()
    y[by:] = x[: x.shape[0] - by] * 2
    return y


SPECS = [P("a"), P(None, "a"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


@given(
    program=PROGRAMS,
    shape=st.sampled_from([(6, 4), (7, 7), (5, 9), (12, 3)]),
    spec=st.sampled_from(SPECS),
    sizes=st.sampled_from([(2, 2), (3, 2), (4, 1), (2, 3)]),
    inside=st.booleans(),
)
@settings(max_examples=examples(12, 1500), deadline=None, database=None, derandomize=True)
def test_programs(
    program: list[tuple[str, int, int]],
    shape: tuple[int, int],
    spec: P,
    sizes: tuple[int, int],
    inside: bool,
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for name, i, j in program:
            x = STEPS[name](x, i, j)
        return x

    mesh = Mesh({"a": sizes[0], "b": sizes[1]}, virtual=True)
    x = random(*shape)
    placed = place(x, mesh, spec)
    compare(shard(fn, mesh)(placed), fn(x))
    want = torch.func.grad(slope(fn))(x)
    if inside or "filled" in [name for name, *_ in program]:  # see below
        compare(shard(torch.func.grad(slope(fn)), mesh, out_specs=spec)(placed), want)
    else:
        compare(torch.func.grad(shard(slope(fn), mesh))(placed), want)
