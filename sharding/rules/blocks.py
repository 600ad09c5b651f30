"""Blocks and windows: three operations that express reads of neighbours along a split dim.

A dim of n elements over R ranks becomes R *blocks* of ceil(n/R) elements, padded at the end. The dim of
blocks is split evenly and a block is never split, so ``blocks`` and ``unblocks`` are local. Only
``windows`` communicates: the window of a block is a list of runs of the blocked dim, of which a rank
fetches the elements that it does not hold. ``neighbours.py`` decomposes operations into these three, and
``windows.py`` lowers the third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell

__all__ = [
    "MOVED_AS_BLOCKS",
    "Piece",
    "Window",
    "assemble",
    "blocks",
    "fetched",
    "pieces",
    "take",
    "unblocks",
    "window_of",
    "windows",
]

Run = tuple[int, int, int, int]  # start in the blocked dim, length, step, offset in the window
Apply = Callable[..., Any]


@dataclass(frozen=True)
class Window:
    """The windows of all blocks along one dim.

    Attributes:
        dim: the dim of blocks; the dim after it holds the elements of a block.
        width: the number of elements of a window.
        fill: the value of the elements that no run covers.
        runs: for each block, disjoint runs, ordered by their offsets in its window.
    """

    dim: int
    width: int
    fill: float | int | bool
    runs: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A slice of a block or, where ``block`` is None, as many fill values."""

    block: int | None
    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return len(range(self.start, self.stop, self.step))


def pieces(window: Window, block_size: int) -> list[list[Piece]]:
    """The pieces of every window, in order, for blocks of ``block_size`` elements."""
    return [list(_pieces(runs, window.width, block_size)) for runs in window.runs]


def _pieces(runs: Sequence[Run], width: int, block_size: int) -> Iterator[Piece]:
    filled = 0
    for start, length, step, offset in runs:
        if offset > filled:
            yield Piece(None, 0, offset - filled)
        yield from _by_block(start, start + (length - 1) * step, step, block_size)
        filled = offset + length
    if filled < width:
        yield Piece(None, 0, width - filled)


def _by_block(first: int, last: int, step: int, block_size: int) -> Iterator[Piece]:
    """The pieces of one run, one for each block that it reads."""
    while first <= last:
        block = first // block_size
        begin = block * block_size
        inside = range(first, min(begin + block_size, last + 1), step)
        yield Piece(block, first - begin, inside[-1] - begin + 1, step)
        first = inside[-1] + step


def fetched(window: Window, block_size: int) -> int:
    """The elements along the dim that the busiest rank sends or receives, with one block per rank."""
    count = len(window.runs)
    sent, received = [0] * count, [0] * count
    for rank, parts in enumerate(pieces(window, block_size)):
        for piece in parts:
            if piece.block not in (None, rank):
                received[rank] += piece.size
                sent[piece.block or 0] += piece.size
    return max(*sent, *received, 0)


# -- the operations -------------------------------------------------------------------------------


def _to_blocks(
    do: Apply, x: Any, have: Sequence[int], dim: int, want: Sequence[int], fill: Any
) -> Any:
    """Pad x and reshape it from shape ``have`` to shape ``want``, both global or both local."""
    missing = want[dim] * want[dim + 1] - have[dim]
    if missing:
        pad = [0, 0] * (len(have) - 1 - dim) + [0, missing]
        x = do(aten.constant_pad_nd.default, x, pad, fill)
    return do(aten.reshape.default, x, list(want))


def _from_blocks(do: Apply, x: Any, have: Sequence[int], dim: int, want: Sequence[int]) -> Any:
    flat = [*have[:dim], have[dim] * have[dim + 1], *have[dim + 2 :]]
    x = do(aten.reshape.default, x, flat)
    return x if flat[dim] == want[dim] else do(aten.slice.Tensor, x, dim, 0, want[dim])


def assemble(do: Apply, taken: Sequence[Any], shape: Sequence[int], like: torch.Tensor, w: Window,
             parts: Sequence[Piece]) -> Any:
    """One window [..., 1, width, ...]: the values taken from blocks and fill values, concatenated."""
    dim, values, rest = w.dim + 1, [], iter(taken)
    for piece in parts:
        if piece.block is not None:
            values.append(next(rest))
        else:
            size = [*shape[:dim], piece.size, *shape[dim + 1 :]]
            kind = {"dtype": like.dtype, "device": like.device}
            values.append(do(aten.full.default, size, w.fill, **kind))
    return values[0] if len(values) == 1 else do(aten.cat.default, values, dim)


def take(do: Apply, block: Any, dim: int, piece: Piece) -> Any:
    """Slice a piece out of its block [..., 1, block size, ...]."""
    return do(aten.slice.Tensor, block, dim + 1, piece.start, piece.stop, piece.step)


def _all_windows(do: Apply, x: Any, shape: Sequence[int], like: torch.Tensor, w: Window) -> Any:
    """All windows, where all blocks are available locally."""
    block_shape = [*shape[: w.dim], 1, *shape[w.dim + 1 :]]
    blocks_ = [do(aten.slice.Tensor, x, w.dim, j, j + 1) for j in range(shape[w.dim])]
    assembled = []
    for parts in pieces(w, shape[w.dim + 1]):
        taken = [take(do, blocks_[p.block], w.dim, p) for p in parts if p.block is not None]
        assembled.append(assemble(do, taken, block_shape, like, w, parts))
    return do(aten.cat.default, assembled, w.dim)


def _eagerly(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _blocks(x: torch.Tensor, dim: int, count: int, fill: Any) -> torch.Tensor:
    n = x.shape[dim]
    want = [*x.shape[:dim], count, -(-n // count), *x.shape[dim + 1 :]]
    blocked: torch.Tensor = _to_blocks(_eagerly, x, x.shape, dim, want, fill)
    return blocked.clone() if internals.is_view(blocked) else blocked


def _unblocks(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    want = [*x.shape[:dim], size, *x.shape[dim + 2 :]]
    unblocked: torch.Tensor = _from_blocks(_eagerly, x, x.shape, dim, want)
    return unblocked.clone()


def _windows(x: torch.Tensor, dim: int, runs: list[int], width: int, fill: Any) -> torch.Tensor:
    window = _window(x.shape[dim], dim, runs, width, fill)
    result: torch.Tensor = _all_windows(_eagerly, x, x.shape, x, window)
    return result


_library = torch.library.Library("torchard", "FRAGMENT")
for _fn, _schema in (
    (_blocks, "blocks(Tensor x, int dim, int count, Scalar fill) -> Tensor"),
    (_unblocks, "unblocks(Tensor x, int dim, int size) -> Tensor"),
    (_windows, "windows(Tensor x, int dim, int[] runs, int width, Scalar fill) -> Tensor"),
):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _fn, "CompositeExplicitAutograd")

_BLOCKS: Any = torch.ops.torchard.blocks.default
_UNBLOCKS: Any = torch.ops.torchard.unblocks.default
_WINDOWS: Any = torch.ops.torchard.windows.default
MOVED_AS_BLOCKS = frozenset({_BLOCKS, _UNBLOCKS, _WINDOWS})  # on a rank, views or fetched values: no work


def _fake_blocks(x: torch.Tensor, dim: int, count: int, fill: Any) -> torch.Tensor:
    n = x.shape[dim]
    return x.new_empty([*x.shape[:dim], count, -(-n // count), *x.shape[dim + 1 :]])


def _fake_unblocks(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 2 :]])


def _fake_windows(x: torch.Tensor, dim: int, runs: list[int], width: int, fill: Any) -> torch.Tensor:
    return x.new_empty([*x.shape[: dim + 1], width, *x.shape[dim + 2 :]])


torch.library.register_fake("torchard::blocks", _fake_blocks, lib=_library)
torch.library.register_fake("torchard::unblocks", _fake_unblocks, lib=_library)
torch.library.register_fake("torchard::windows", _fake_windows, lib=_library)


def blocks(x: torch.Tensor, dim: int, count: int, fill: float | int | bool = 0) -> torch.Tensor:
    """Reshape [..., n, ...] to [..., count, ceil(n / count), ...], padded at the end with ``fill``."""
    result: torch.Tensor = _BLOCKS(x, dim, count, fill)
    return result


def unblocks(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Reshape [..., count, block size, ...] to [..., size, ...], without the padding."""
    result: torch.Tensor = _UNBLOCKS(x, dim, size)
    return result


def windows(x: torch.Tensor, window: Window) -> torch.Tensor:
    """The windows of blocks: [..., count, block size, ...] to [..., count, width, ...]."""
    runs = [n for j, of_block in enumerate(window.runs) for run in of_block for n in (j, *run)]
    result: torch.Tensor = _WINDOWS(x, window.dim, runs, window.width, window.fill)
    return result


def _window(count: int, dim: int, runs: Sequence[int], width: int, fill: Any) -> Window:
    by_block: list[list[Run]] = [[] for _ in range(count)]
    for j, start, length, step, offset in zip(*[iter(runs)] * 5, strict=True):
        by_block[j].append((start, length, step, offset))
    return Window(dim, width, fill, tuple(map(tuple, by_block)))


def window_of(node: fx.Node) -> Window | None:
    """The windows that a node computes; None for other nodes."""
    if node.target is not _WINDOWS:
        return None
    x, dim, runs, width, fill = node.args
    return _window(VAL.of(x).shape[dim], dim, runs, width, fill)  # type: ignore[arg-type]


# -- rules of the operations ----------------------------------------------------------------------


def _blocks_text(call: Call) -> str:
    dim, names = call.arg(1), letters(len(call.ins[0]))
    out = [*names[:dim], "r", "c", *names[dim + 1 :]]
    return f"{spell(names)} -> {spell(out)}{_linear(call.arg(3))} | whole c | tie {names[dim]} r"


def _unblocks_text(call: Call) -> str:
    dim, names = call.arg(1), letters(len(call.outs[0]))
    have = [*names[:dim], "r", "c", *names[dim + 1 :]]
    return f"{spell(have)} -> {spell(names)} | linear 0 | whole c | tie {names[dim]} r"


def _windows_text(call: Call) -> str:
    window = window_of(call.node)
    assert window is not None
    dim, names = window.dim, letters(len(call.ins[0]))
    out = [*names[: dim + 1], "w", *names[dim + 2 :]]
    rows = fetched(window, call.ins[0][dim + 1])
    r, c = names[dim : dim + 2]
    return f"{spell(names)} -> {spell(out)}{_linear(window.fill)} | whole {c} w | halo {r} {c} {rows}"


def _linear(fill: Any) -> str:
    """The clause for a fill of zero; any other value would be added once per partial sum."""
    return " | linear 0" if fill == 0 else ""


def _emit_blocks(call: Call, local: Local) -> Any:
    _, dim, _, fill = call.node.args
    have, want = local.operand_shape(0), local.shape()
    return _to_blocks(local.call, local.args[0], have, dim, want, fill)  # type: ignore[arg-type]


def _emit_unblocks(call: Call, local: Local) -> Any:
    have, want = local.operand_shape(0), local.shape()
    return _from_blocks(local.call, local.args[0], have, call.arg(1), want)


def _emit_windows(call: Call, local: Local) -> Any:
    """All windows, where no rank lacks a block; else ``windows.py`` lowers the node instead."""
    window = window_of(call.node)
    assert window is not None
    like = VAL.of(call.node)
    return _all_windows(local.call, local.args[0], local.operand_shape(0), like, window)


register_rule(_BLOCKS, text=_blocks_text, emit=_emit_blocks)
register_rule(_UNBLOCKS, text=_unblocks_text, emit=_emit_unblocks)
register_rule(_WINDOWS, text=_windows_text, emit=_emit_windows)
