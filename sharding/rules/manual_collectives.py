"""Rules of shard_map's collectives, along the mesh axes over which they do not communicate.

Along those axes a local value is a global one, so a collective is an operation like any other: a psum
over tp is pointwise in a batch that dp splits. A dim that it gathers or scatters is written ``(k d)``:
the ranks k may not be split, the shard d of each rank may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchard.sharding.manual.manual_collectives import (
    Enter,
    Exchange,
    Extreme,
    Gather,
    GatherWhole,
    Leave,
    Move,
    Scatter,
    Slice,
    is_move,
    move_of,
)
from torchard.sharding.rules.registry import Call, OpRule, find, letters, spell

DimNames = list[str]


def _same(move: Move, dims: DimNames) -> tuple[DimNames, DimNames]:
    return dims, dims


def _gathered(move: Any, dims: DimNames) -> tuple[DimNames, DimNames]:
    return dims, _parted(dims, move.dim, move.size)


def _scattered(move: Any, dims: DimNames) -> tuple[DimNames, DimNames]:
    return _parted(dims, move.dim, move.size), dims


def _exchanged(move: Exchange, dims: DimNames) -> tuple[DimNames, DimNames]:
    return _parted(dims, move.split, move.size), _parted(dims, move.concat, move.size, "j")


def _entered(move: Enter, dims: DimNames) -> tuple[DimNames, DimNames]:
    return _outside(move, dims), dims


def _left(move: Leave, dims: DimNames) -> tuple[DimNames, DimNames]:
    return dims, _outside(move, dims)


def _outside(edge: Enter | Leave, dims: DimNames) -> DimNames:
    """The dims of the global value at an edge of manual mode: the ranks that split each, and the rest."""
    counted = zip(dims, edge.counts, strict=True)
    return [_part(d, n, f"k{i}") for i, (d, n) in enumerate(counted)]


def _parted(dims: DimNames, dim: int, size: int, rank: str = "k") -> DimNames:
    return [_part(d, size if i == dim else 1, rank) for i, d in enumerate(dims)]


def _part(dim: str, size: int, rank: str) -> str:
    return dim if size == 1 else f"({rank}={size} {dim})"


_DIMS: dict[type[Move], Callable[[Any, DimNames], tuple[DimNames, DimNames]]] = {
    Enter: _entered,
    Leave: _left,
    Gather: _gathered,
    GatherWhole: _gathered,
    Scatter: _scattered,
    Slice: _scattered,
    Exchange: _exchanged,
}


def _text(call: Call) -> str:
    move = move_of(call.node)
    assert move is not None
    dims = letters(len(call.ins[0]))
    before, after = _DIMS.get(type(move), _same)(move, dims)
    ranks = _ranks(before) | _ranks(after)
    whole = f" | whole {' '.join(sorted(ranks))}" if ranks else ""
    linear = "" if isinstance(move, Extreme) else " | linear 0"
    return f"{spell(before)} -> {spell(after)}{whole}{linear}"


def _ranks(dims: DimNames) -> set[str]:
    """The factors of ranks, which are in front of those of their shards."""
    return {dim[1:].partition("=")[0] for dim in dims if dim.startswith("(k")}


_RULE = OpRule(_text)


@find
def move_rule(target: Any) -> OpRule | None:
    return _RULE if is_move(target) else None
