"""The table of decompositions of operations that read neighbours along a split dim.

Each is written with the blocks of the dim (``rules/blocks.py``): a window of the neighbours' elements is
fetched, and the operation itself runs on the windows, in which the dim is whole. Only elements that
change rank are sent. An entry takes, before the operation's own arguments, the number of shards of each
dim of each operand; it returns NotImplemented for calls that it does not support, which are gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.blocks import Window, blocks, unblocks, windows
from torchard.sharding.rules.compute.scan import SUMS_FROM, sums_from

__all__ = [
    "NEIGHBOURS",
    "Parts",
    "clipped",
    "each_of",
    "in_windows",
    "is_split",
    "places_in",
    "register",
    "starts",
    "strided",
]

Parts = Sequence[Sequence[int]]
Run = tuple[int, int, int, int]
NEIGHBOURS: dict[Any, Callable[..., Any]] = {}


def register(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            NEIGHBOURS[target] = fn
        return fn

    return register


def each_of(n: int, count: int) -> int:
    return -(-n // count)


def is_split(n: int, count: int) -> bool:
    """Whether the dim is split, and into no more blocks than it has elements."""
    return 1 < count <= n


def clipped(start: int, stop: int, size: int) -> tuple[Run, ...]:
    """A run of a window from ``start``, clipped to the dim."""
    low, high = max(start, 0), min(stop, size)
    return ((low, high - low, 1, low - start),) if low < high else ()


def in_windows(
    x: torch.Tensor, dim: int, width: int, runs: Sequence[tuple[Run, ...]], fill: Any = 0
) -> torch.Tensor:
    """The windows of x [..., n, ...], one per block, given by runs of x: [..., count, width, ...]."""
    return windows(blocks(x, dim, len(runs)), Window(dim, width, fill, tuple(runs)))


def starts(like: torch.Tensor, dim: int, count: int, step: int, first: int = 0) -> torch.Tensor:
    """first + j step for every block j, to be added along the dim of blocks of ``like``."""
    offsets = torch.arange(count, device=like.device) * step + first
    return offsets.reshape(count, *(1 for _ in like.shape[dim + 1 :]))


def places_in(like: torch.Tensor, dim: int, count: int, each: int) -> torch.Tensor:
    """The indices of elements in the whole dim, [count, each, 1, ...], which broadcast to blocks."""
    indices = torch.arange(count * each, device=like.device)
    return indices.reshape(count, each, *(1 for _ in like.shape[dim + 1 :]))


def strided(
    x: torch.Tensor, dim: int, count: int, made: int, step: int, first: int, reach: int, fill: Any = 0
) -> torch.Tensor:
    """The windows of x for the blocks of a result whose element i reads x from first + i step on.

    Args:
        made: elements of the result along the dim.
        reach: the number of elements of x that each of these elements reads.
        fill: the value that elements read outside of x.
    Returns:
        [..., count, width, ...]: in block j, the elements of x that the result's block j reads.
    """
    each, n = each_of(made, count), x.shape[dim]
    runs = []
    for j in range(count):
        own = min(each, made - j * each)
        start = first + j * each * step
        runs.append(clipped(start, start + (own - 1) * step + reach, n) if own > 0 else ())
    width = (each - 1) * step + reach
    return in_windows(x, dim, width, runs, fill)


# -- moving along the dim -------------------------------------------------------------------------


@register(aten.slice.Tensor)
def _slice(
    parts: Parts, x: torch.Tensor, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Any:
    dim, n = dim % x.ndim, x.shape[dim]
    count, places = parts[0][dim], range(*slice(start, stop, step).indices(n))
    if not is_split(n, count) or not places:
        return NotImplemented
    each, runs = each_of(len(places), count), []
    for j in range(count):
        own = places[j * each : (j + 1) * each]
        runs.append(((own[0], len(own), step, 0),) if own else ())
    return unblocks(in_windows(x, dim, each, runs), dim, len(places))


@register(aten.slice_backward.default)
def _slice_backward(
    parts: Parts, grad: torch.Tensor, sizes: list[int], dim: int, start: int, stop: int, step: int
) -> Any:
    dim %= grad.ndim
    first = slice(start, stop).indices(sizes[dim])[0]
    if step == 1:
        return _shifted(parts, grad, dim, sizes[dim], -first)
    n, count = grad.shape[dim], parts[0][dim]
    each = each_of(sizes[dim], count)
    if not is_split(n, count) or each % step:
        return NotImplemented
    runs, own = [], each // step  # as many in each block, and at the same places
    for j in range(count):
        behind = -((first - j * each) // step)
        runs.append(clipped(behind, behind + own, n))
    taken = in_windows(grad, dim, own, runs)
    spaced = [*taken.shape[: dim + 1], each, *taken.shape[dim + 2 :]]
    placed = aten.slice_backward.default(taken, spaced, dim + 1, first % step, each, step)
    return unblocks(placed, dim, sizes[dim])


def _shifted(
    parts: Parts, x: torch.Tensor, dim: int, made: int, first: int, fill: Any = 0
) -> Any:
    """A value shifted along a dim, into a result of another size."""
    count = parts[0][dim]
    if not is_split(x.shape[dim], count):
        return NotImplemented
    return unblocks(strided(x, dim, count, made, 1, first, 1, fill), dim, made)


@register(aten.constant_pad_nd.default)
def _pad(parts: Parts, x: torch.Tensor, pad: list[int], value: Any = 0) -> Any:
    for place in range(len(pad) // 2):
        dim = x.ndim - 1 - place
        before, after = pad[2 * place : 2 * place + 2]
        made = x.shape[dim] + before + after
        if parts[0][dim] == 1 or not (before or after) or made <= 0:
            continue
        moved = _shifted(parts, x, dim, made, -before, value)
        if moved is NotImplemented:
            return moved
        rest = [*pad[: 2 * place], 0, 0, *pad[2 * place + 2 :]]
        return aten.constant_pad_nd.default(moved, rest, value) if any(rest) else moved
    return NotImplemented


@register(aten.roll.default)
def _roll(parts: Parts, x: torch.Tensor, shifts: list[int], dims: Sequence[int] = ()) -> Any:
    for k, dim in enumerate(d % x.ndim for d in dims):
        n, count = x.shape[dim], parts[0][dim]
        if not is_split(n, count):
            continue
        each, shift = each_of(n, count), shifts[k] % n
        runs = []
        for j in range(count):
            start, stop = j * each - shift, min((j + 1) * each, n) - shift
            runs.append((*clipped(start + n, stop + n, n), *clipped(start, stop, n)))
        done = unblocks(in_windows(x, dim, each, runs), dim, n)
        rest = [(s, d) for i, (s, d) in enumerate(zip(shifts, dims, strict=True)) if i != k]
        return aten.roll.default(done, *map(list, zip(*rest, strict=True))) if rest else done
    return NotImplemented


@register(aten.flip.default)
def _flip(parts: Parts, x: torch.Tensor, dims: Sequence[int]) -> Any:
    for k, dim in enumerate(d % x.ndim for d in dims):
        n, count = x.shape[dim], parts[0][dim]
        if not is_split(n, count):
            continue
        each = each_of(n, count)
        runs = []
        for j in range(count):
            start = n - (j + 1) * each
            runs.append(clipped(start, start + each, n))
        turned = aten.flip.default(in_windows(x, dim, each, runs), [dim + 1])
        done = unblocks(turned, dim, n)
        rest = [d for i, d in enumerate(dims) if i != k]
        return aten.flip.default(done, rest) if rest else done
    return NotImplemented


@register(aten.split.Tensor, aten.split_with_sizes.default)
def _split(parts: Parts, x: torch.Tensor, sizes: int | list[int], dim: int = 0) -> Any:
    """Split by one exchange for all results: a window is a block's part of each of them."""
    dim, count = dim % x.ndim, parts[0][dim]
    n = x.shape[dim]
    if not is_split(n, count):
        return NotImplemented
    pieces = [p.shape[dim] for p in torch.split(x, sizes, dim)]
    each = [each_of(size, count) for size in pieces]
    starts_of = list(itertools.accumulate(pieces, initial=0))
    places = list(itertools.accumulate(each, initial=0))
    runs = [
        tuple(
            (start + j * e, min(e, size - j * e), 1, place)
            for start, place, size, e in zip(starts_of, places, pieces, each, strict=False)
            if j * e < size
        )
        for j in range(count)
    ]
    taken = in_windows(x, dim, places[-1], runs)
    return [
        unblocks(taken.narrow(dim + 1, place, e), dim, size)
        for place, e, size in zip(places, each, pieces, strict=False)
    ]


@register(aten.cat.default)
def _cat(parts: Parts, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Concatenate by one exchange for all operands, with their blocks side by side."""
    dim %= tensors[0].ndim
    made = sum(x.shape[dim] for x in tensors)
    count = max(part[dim] for part in parts)
    if not is_split(made, count):
        return NotImplemented
    each = [each_of(x.shape[dim], count) for x in tensors]
    offsets = list(itertools.accumulate((x.shape[dim] for x in tensors), initial=0))
    beside = torch.cat([blocks(x, dim, count) for x in tensors], dim + 1)
    width = each_of(made, count)
    runs: list[tuple[Run, ...]] = []
    for j in range(count):
        own: list[Run] = []
        for k, e in enumerate(each):
            low, high = max(j * width, offsets[k]), min((j + 1) * width, offsets[k + 1])
            own += _of_blocks(low - offsets[k], high - offsets[k], low - j * width, each, k) if e else []
        runs.append(tuple(own))
    window = Window(dim, width, 0, tuple(runs))
    return unblocks(windows(beside, window), dim, made)


def _of_blocks(start: int, stop: int, place: int, each: Sequence[int], k: int) -> Iterator[Run]:
    """The runs of an operand, one for each block, where blocks of several operands are side by side."""
    first, whole = start, sum(each)
    while first < stop:
        block, inside = divmod(first, each[k])
        length = min(each[k] - inside, stop - first)
        yield block * whole + sum(each[:k]) + inside, length, 1, place + first - start
        first += length


@register(aten.slice_scatter.default)
def _slice_scatter(
    parts: Parts, x: torch.Tensor, y: torch.Tensor, dim: int = 0, *ends: Any
) -> Any:
    """Scatter a slice: the written values move to the blocks they are written to."""
    dim, n = dim % x.ndim, x.shape[dim]
    given: list[Any] = [*ends, *[None, None, 1][len(ends) :]]
    start, stop, step = given
    places = range(*slice(start, stop, step).indices(n))
    count = max(parts[0][dim], parts[1][dim])
    if step != 1 or not places or not is_split(n, count) or not is_split(len(places), count):
        return NotImplemented
    part = strided(y, dim, count, n, 1, -places.start, 1)
    at = places_in(x, dim, count, each_of(n, count))
    written = (at >= places.start) & (at < places.stop)
    return unblocks(torch.where(written, part, blocks(x, dim, count)), dim, n)


@register(aten.unfold.default)
def _unfold(parts: Parts, x: torch.Tensor, dim: int, size: int, step: int) -> Any:
    dim %= max(x.ndim, 1)
    if not x.ndim or not is_split(x.shape[dim], parts[0][dim]):
        return NotImplemented
    made = (x.shape[dim] - size) // step + 1
    taken = strided(x, dim, parts[0][dim], made, step, 0, size)
    return unblocks(taken.unfold(dim + 1, size, step), dim, made)


@register(aten.unfold_backward.default)
def _unfold_backward(
    parts: Parts, grad: torch.Tensor, sizes: list[int], dim: int, size: int, step: int
) -> Any:
    """Sum into each block the windows that overlap it, including some of its neighbours."""
    dim %= len(sizes)
    n, made, count = sizes[dim], grad.shape[dim], parts[0][dim]
    each = each_of(n, count)
    if not is_split(made, count) or each % step:
        return NotImplemented
    behind = -((1 - size) // -step)  # of a block's first element: the first window with it, <= 0
    own = each // step - behind
    begin = [j * each // step + behind for j in range(count)]
    runs = [clipped(first, first + own, made) for first in begin]
    taken = in_windows(grad, dim, own, runs)
    # Windows may leave gaps, also before the end of a block.
    reach = max((own - 1) * step + size, each - behind * step)
    local = [*sizes[:dim], count, reach, *sizes[dim + 1 :]]
    summed = aten.unfold_backward.default(taken, local, dim + 1, size, step)
    return unblocks(summed.narrow(dim + 1, -behind * step, each), dim, n)


# -- scans along the dim ------------------------------------------------------------------------


@register(aten.cumsum.default)
def _cumsum(parts: Parts, x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """The cumulative sum: within blocks, plus the sums of the blocks before."""
    dim %= max(x.ndim, 1)
    if not x.ndim or not is_split(x.shape[dim], parts[0][dim]):
        return NotImplemented
    count = parts[0][dim]
    within = torch.cumsum(blocks(x, dim, count), dim + 1, dtype=dtype)
    totals = torch.cumsum(within.select(dim + 1, -1), dim)
    return _with_others(within, totals.narrow(dim, 0, count - 1), dim, x.shape[dim], (1, 0))


@register(SUMS_FROM)
def _sums_from(parts: Parts, x: torch.Tensor, dim: int) -> Any:
    """The cumulative sum from the end."""
    dim %= max(x.ndim, 1)
    if not x.ndim or not is_split(x.shape[dim], parts[0][dim]):
        return NotImplemented
    count = parts[0][dim]
    within = sums_from(blocks(x, dim, count), dim + 1)
    totals = sums_from(within.select(dim + 1, 0), dim)
    return _with_others(within, totals.narrow(dim, 1, count - 1), dim, x.shape[dim], (0, 1))


def _with_others(
    within: torch.Tensor, others: torch.Tensor, dim: int, size: int, pad: tuple[int, int]
) -> torch.Tensor:
    """Add to sums within blocks, [..., count, each, ...], those of other blocks, of all but one."""
    wide = [0, 0] * (others.ndim - 1 - dim) + [*pad]
    others = aten.constant_pad_nd.default(others, wide, 0)
    return unblocks(within + others.unsqueeze(dim + 1), dim, size)


@register(aten.topk.default)
def _topk(
    parts: Parts, x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """The top k of the top k of each block."""
    dim %= max(x.ndim, 1)
    n, count = (x.shape[dim], parts[0][dim]) if x.ndim else (0, 1)
    each = each_of(n, count)
    if not is_split(n, count) or count * min(k, each) >= n:
        return NotImplemented
    best = _first_of_sorted if n % count else torch.topk
    filled = blocks(x, dim, count, _worst(x.dtype, largest) if n % count else 0)
    values, places = best(filled, min(k, each), dim + 1, largest)
    places = places + starts(places, dim, count, each)
    shape = [*x.shape[:dim], -1, *x.shape[dim + 1 :]]
    values, at = best(values.reshape(shape), k, dim, largest)
    return values, torch.gather(places.reshape(shape), dim, at)


def _first_of_sorted(x: torch.Tensor, k: int, dim: int, largest: bool) -> Any:
    """topk that takes the first of equal elements, so that the fill of the last block is taken last."""
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)


def _worst(dtype: torch.dtype, largest: bool) -> float | int:
    """The value that topk takes last; NaN is above all numbers."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.nan
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
