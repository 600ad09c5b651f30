"""Random functions of two caches that write into them, read them, and return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["RandomWrites", "compiled_writes"]

SHAPE = (3, 4, 6)
ROWS = torch.tensor([2, 0])
LANES = torch.tensor([1, 4])
INDEX = torch.arange(36).reshape(3, 2, 6) % 4
MASK = torch.arange(72).reshape(SHAPE) % 5 == 0

Source = Callable[[tuple[int, ...]], Tensor]
Write = Callable[[Tensor, Source, int], Tensor]


def _through(view: Callable[[Tensor, int], Tensor]) -> Write:
    """A write into a view of a copy."""

    def write(v: Tensor, source: Source, i: int) -> Tensor:
        result = v.clone()
        part = view(result, i)
        part.copy_(source(tuple(part.shape)))
        return result

    return write


def _nested(v: Tensor, source: Source, i: int) -> Tensor:
    result = v.clone()
    result[i].index_put_((torch.tensor([3, 1]),), source((2, 6)))
    return result


def _rows(v: Tensor, source: Source, i: int) -> Tensor:
    result = v.clone()
    for row in range(3):
        result[row] = result[(row + i) % 3] + source((4, 6))
    return result


def _added(v: Tensor, source: Source, i: int) -> Tensor:
    result = v.clone()
    for row in range(9):
        result[row % 3, i].add_(source((6,)))
    return result


def _read_between(v: Tensor, source: Source, i: int) -> Tensor:
    result = v.clone()
    part = result[i]
    part[1:3] = source((2, 6))
    result[(i + 1) % 3, :2] = part[1:3] * 2  # the view, after a write through it
    return result


WRITES: dict[str, Write] = {
    "select": lambda v, s, i: torch.select_scatter(v, s((4, 6)), 0, i),
    "slice": lambda v, s, i: torch.slice_scatter(v, s((3, 2, 6)), 1, i, i + 2),
    "shift": lambda v, s, i: torch.slice_scatter(v, v[:-1], 0, 1, 3),
    "index_put": lambda v, s, i: v.index_put((ROWS,), s((2, 4, 6))),
    "index_put of pairs": lambda v, s, i: v.index_put((ROWS, LANES % 4), s((2, 6))),
    "accumulate": lambda v, s, i: v.index_put((ROWS * 0 + i,), s((2, 4, 6)), accumulate=True),
    "index_copy": lambda v, s, i: v.index_copy(2, LANES, s((3, 4, 2))),
    "index_add": lambda v, s, i: v.index_add(2, LANES * 0 + i, s((3, 4, 2))),
    "index_fill": lambda v, s, i: v.index_fill(1, ROWS, i),
    "scatter": lambda v, s, i: v.scatter(2, LANES.expand(3, 4, 2), s((3, 4, 2))),
    "scatter a number": lambda v, s, i: v.scatter(1, INDEX, i),
    "scatter_add": lambda v, s, i: v.scatter_add(1, INDEX, s((3, 2, 6))),
    "scatter_reduce": lambda v, s, i: v.scatter_reduce(1, INDEX, s((3, 2, 6)), "amax"),
    "masked_fill": lambda v, s, i: v.masked_fill(MASK, i),
    "a slice of a row": _through(lambda v, i: v[i][1:3]),
    "a stepped slice": _through(lambda v, i: v[:, i % 2 :: 2]),
    "a flat row": _through(lambda v, i: v[i].view(-1)[3 + i : 9 + i]),
    "transposed": _through(lambda v, i: v.transpose(0, 1)[i, :2]),
    "flat": _through(lambda v, i: v.view(-1)[5 * i : 5 * i + 30]),
    "a diagonal": _through(lambda v, i: v[:, :, i].diagonal()),
    "all": _through(lambda v, i: v),
    "nested": _nested,
    "rows": _rows,
    "added": _added,
    "read between": _read_between,
    "combined": lambda v, s, i: v * 2 - s(SHAPE),
    "permuted": lambda v, s, i: torch.select_scatter(v.permute(1, 2, 0), s((6, 3)), 0, i).permute(
        2, 0, 1
    ),
}

# What is made of a slice of the elements of a value, to be written somewhere.
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda u: u,
    "doubled": lambda u: u * 2 + 1,
    "transposed": lambda u: (u + 1).mT if u.ndim > 1 and u.shape[-1] == u.shape[-2] else u.flip(0),
    "summed": lambda u: u.sum().expand(u.shape),
}

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda u: u.sum((0, 2)),
    "row": lambda u: u[1],
    "flat": lambda u: u.reshape(-1),
    "plus": lambda u: u + 1,
    "transposed": lambda u: u.transpose(0, 2),
}


@dataclass(frozen=True)
class RandomWrites:
    """A function of the caches `a` and `b`: each step adds a value to these, the last are returned."""

    steps: tuple[tuple[str, int, str, int, int, int], ...]
    results: tuple[tuple[str | None, int], ...]

    def __call__(self, a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for write, into, source, of, start, i in self.steps:
            u = values[of % len(values)]

            def made(shape: tuple[int, ...], u: Any = u, name: str = source, at: int = start) -> Tensor:
                count = torch.Size(shape).numel()
                at = min(at, 72 - count)
                return SOURCES[name](u.reshape(-1)[at : at + count].reshape(shape))

            values.append(WRITES[write](values[into % len(values)], made, i))
        chosen = [(read, values[-1 - k % len(values)]) for read, k in self.results]
        return [READS[read](u) if read else u for read, u in chosen]


@st.composite
def compiled_writes(draw: st.DrawFn) -> RandomWrites:
    """Functions of one to six steps, which mostly write into the newest values."""
    small = st.integers(0, 7)
    names = st.sampled_from(sorted(WRITES))
    steps = []
    for n in range(draw(st.integers(1, 6))):
        into = draw(st.one_of(st.just(n + 1), small))
        source = draw(st.sampled_from(sorted(SOURCES)))
        numbers = draw(st.tuples(small, st.integers(0, 40), st.integers(0, 2)))
        steps.append((draw(names), into, source, *numbers))
    read = st.one_of(st.none(), st.sampled_from(sorted(READS)))
    results = st.lists(st.tuples(read, st.one_of(st.just(0), small)), min_size=1, max_size=4)
    return RandomWrites(tuple(steps), tuple(draw(results)))
