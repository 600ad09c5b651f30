"""Moves: what a user calls in manual mode, one value for each, before anything runs them.

Every one is a linear map that knows its transpose and its batched form (pmax and pmin alone are not
linear), the shape it gives, and how it changes along which mesh axes a value varies. In a traced
program a move is one opaque operation, from whose arguments ``move_of`` reads it back; the collective
that it names (`Move.collective`) is what ``lower_manual.py`` lowers. The transposes are those of JAX's
shard_map with check_vma=True.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import fx

from torchard.functional.core.errors import DerivativeError
from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveOp,
    LocalSlice,
    Ppermute,
    PsumScatter,
)

__all__ = [
    "Enter",
    "Exchange",
    "Extreme",
    "Gather",
    "GatherWhole",
    "Leave",
    "Move",
    "Permute",
    "Scatter",
    "Slice",
    "Sum",
    "Vary",
    "axis_index_op",
    "is_axis_index",
    "is_edge",
    "is_move",
    "manual_around",
    "move_of",
]

Shape = tuple[int, ...]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Move:
    """One collective, or one edge of the region where values are local.

    Attributes:
        manual: the axes along which the values around it are local; it works over some of them.
        op: its operation in namespace ``torchard``, and (``schema``) that operation's arguments.
        takes: what its operand must be over ``axes``: "varying" or "invariant".
        gives: what its result is over them.
    """

    manual: Axes
    op: ClassVar[str]
    schema: ClassVar[str]
    takes: ClassVar[str] = "varying"
    gives: ClassVar[str] = "varying"

    @property
    def over(self) -> frozenset[str]:
        """The mesh axes it works over."""
        return frozenset(self.axes)  # type: ignore[attr-defined]

    @property
    def collective(self) -> CollectiveOp | None:
        """What it does to local values; None where it only changes what they count as.

        Places are those in layouts made for it, where what it is over stands outermost in its dim.
        """
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        arguments = [getattr(self, f.name) for f in fields(self)]
        listed = [list(a) if isinstance(a, tuple) else a for a in arguments]
        out: torch.Tensor = getattr(torch.ops.torchard, self.op).default(x, *listed)
        return out

    def shape(self, shape: Shape) -> Shape:
        """The shape of the result."""
        return shape

    def after(self, varying: frozenset[str]) -> frozenset[str]:
        """The axes along which the result varies."""
        return varying | self.over if self.gives == "varying" else varying - self.over

    def transposed(self) -> Move:
        """The move of cotangents."""
        raise NotImplementedError

    def excess(self, varying: frozenset[str]) -> frozenset[str]:
        """Axes over which the operand varies and must not."""
        return varying & self.over if self.takes == "invariant" else frozenset()

    def batched(self) -> Move:
        """The same move of values with a new dim in front."""
        return self


def _grown(shape: Shape, dim: int, times: int) -> Shape:
    return (*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def _shrunk(shape: Shape, dim: int, times: int) -> Shape:
    return (*shape[:dim], shape[dim] // times, *shape[dim + 1 :])


@dataclass(frozen=True)
class _Edge(Move):
    """Between global and local values: each dim's axes (joined by commas) and its number of parts."""

    entries: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return tuple(a for entry in self.entries if entry for a in entry.split(","))

    def batched(self) -> Move:
        return replace(self, entries=("", *self.entries), counts=(1, *self.counts))


class Enter(_Edge):
    """A global value, as each rank's shard of it."""

    op, schema, takes = "enter", "str[] entries, int[] counts", "invariant"

    def shape(self, shape: Shape) -> Shape:
        return tuple(n // c for n, c in zip(shape, self.counts, strict=True))

    def transposed(self) -> Move:
        return Leave(self.manual, self.entries, self.counts)


class Leave(_Edge):
    """The ranks' shards, as the global value they make."""

    op, schema, gives = "leave", "str[] entries, int[] counts", "invariant"

    def shape(self, shape: Shape) -> Shape:
        return tuple(n * c for n, c in zip(shape, self.counts, strict=True))

    def transposed(self) -> Move:
        return Enter(self.manual, self.entries, self.counts)

    def excess(self, varying: frozenset[str]) -> frozenset[str]:
        return varying - self.over


@dataclass(frozen=True)
class _Over(Move):
    axes: Axes


class Vary(_Over):
    """The same value on every rank, now counted as each rank's own."""

    op, schema, takes = "pvary", "str[] axes", "invariant"

    def transposed(self) -> Move:
        return Sum(self.manual, self.axes)


class Sum(_Over):
    """The sum over ranks, on every rank."""

    op, schema, gives = "psum", "str[] axes", "invariant"

    @property
    def collective(self) -> AllReduce:
        return AllReduce(self.axes, "sum")

    def transposed(self) -> Move:
        return Vary(self.manual, self.axes)


@dataclass(frozen=True)
class Extreme(_Over):
    """The maximum or minimum over ranks, on every rank."""

    which: str
    op, schema, gives = "pextreme", "str[] axes, str which", "invariant"

    @property
    def collective(self) -> AllReduce:
        return AllReduce(self.axes, self.which)

    def transposed(self) -> Move:
        raise DerivativeError(
            f"p{self.which} has no derivative; detach() its operand, as the maximum of a softmax may "
            "be, or take the maximum of an all_gather."
        )


@dataclass(frozen=True)
class _Along(_Over):
    """Along one dim; ``size`` is the number of ranks."""

    size: int
    dim: int

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)


class Gather(_Along):
    """The ranks' values side by side, counted as each rank's own."""

    op, schema = "all_gather", "str[] axes, int size, int dim"

    @property
    def collective(self) -> AllGather:
        return AllGather(self.axes, (self.dim, 0))

    def shape(self, shape: Shape) -> Shape:
        return _grown(shape, self.dim, self.size)

    def transposed(self) -> Move:
        return Scatter(self.manual, self.axes, self.size, self.dim)


class Scatter(_Along):
    """The sum over ranks, of which each keeps its part."""

    op, schema = "psum_scatter", "str[] axes, int size, int dim"

    @property
    def collective(self) -> PsumScatter:
        return PsumScatter(self.axes, (self.dim, 0))

    def shape(self, shape: Shape) -> Shape:
        return _shrunk(shape, self.dim, self.size)

    def transposed(self) -> Move:
        return Gather(self.manual, self.axes, self.size, self.dim)


class GatherWhole(_Along):
    """The ranks' values side by side, counted as the one value that it is on every rank."""

    op, schema, gives = "all_gather_invariant", "str[] axes, int size, int dim", "invariant"

    @property
    def collective(self) -> AllGather:
        return AllGather(self.axes, (self.dim, 0))

    def shape(self, shape: Shape) -> Shape:
        return _grown(shape, self.dim, self.size)

    def transposed(self) -> Move:
        return Slice(self.manual, self.axes, self.size, self.dim)


class Slice(_Along):
    """Of the same value on every rank, each rank's part; nothing is sent."""

    op, schema, takes = "pslice", "str[] axes, int size, int dim", "invariant"

    @property
    def collective(self) -> LocalSlice:
        return LocalSlice(self.axes, (self.dim, 0))

    def shape(self, shape: Shape) -> Shape:
        return _shrunk(shape, self.dim, self.size)

    def transposed(self) -> Move:
        return GatherWhole(self.manual, self.axes, self.size, self.dim)


@dataclass(frozen=True)
class Exchange(_Over):
    """Rank i's j-th part along ``split`` becomes rank j's i-th part along ``concat``."""

    size: int
    split: int
    concat: int
    op, schema = "all_to_all", "str[] axes, int size, int split, int concat"

    @property
    def collective(self) -> AllToAll:
        """Where ranks and parts are of one dim, the ranks stand outside."""
        to = (self.split, 1 if self.split == self.concat else 0)
        return AllToAll(self.axes, at=(self.concat, 0), to=to)

    def shape(self, shape: Shape) -> Shape:
        return _grown(_shrunk(shape, self.split, self.size), self.concat, self.size)

    def transposed(self) -> Move:
        return replace(self, split=self.concat, concat=self.split)

    def batched(self) -> Move:
        return replace(self, split=self.split + 1, concat=self.concat + 1)


@dataclass(frozen=True)
class Permute(_Over):
    """Rank ``sources[i]``'s value arrives at ``targets[i]``; zeros where nothing arrives."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    op, schema = "ppermute", "str[] axes, int[] sources, int[] targets"

    @property
    def collective(self) -> Ppermute:
        return Ppermute(self.axes, tuple(zip(self.sources, self.targets, strict=True)))

    def transposed(self) -> Move:
        return replace(self, sources=self.targets, targets=self.sources)


_KINDS: tuple[type[Move], ...] = (
    Enter, Leave, Vary, Sum, Extreme, Gather, Scatter, GatherWhole, Slice, Exchange, Permute,
)  # fmt: skip

_library = torch.library.Library("torchard", "FRAGMENT")


def _made(kind: type[Move], arguments: tuple[Any, ...]) -> Move:
    frozen = (tuple(a) if isinstance(a, (list, tuple)) else a for a in arguments)
    return kind(*frozen)


def _define(kind: type[Move]) -> None:
    def fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return x.new_empty(_made(kind, arguments).shape(tuple(x.shape)))

    _library.define(f"{kind.op}(Tensor x, str[] manual, {kind.schema}) -> Tensor")
    torch.library.register_fake(f"torchard::{kind.op}", fake, lib=_library)


for _kind in _KINDS:
    _define(_kind)

_library.define("axis_index(str[] manual, str[] axes, *, Device device) -> Tensor")


def _fake_index(manual: list[str], axes: list[str], *, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


torch.library.register_fake("torchard::axis_index", _fake_index, lib=_library)

_BY_TARGET = {getattr(torch.ops.torchard, kind.op).default: kind for kind in _KINDS}
_INDEX: Any = torch.ops.torchard.axis_index.default


def axis_index_op(manual: Axes, axes: Axes, device: torch.device) -> torch.Tensor:
    """This rank's position along the axes, first outermost: an int64 scalar that varies over them."""
    out: torch.Tensor = _INDEX(list(manual), list(axes), device=device)
    return out


def is_axis_index(node: fx.Node) -> bool:
    """Whether a graph node is a rank's position."""
    return node.target is _INDEX


def manual_around(node: fx.Node) -> frozenset[str]:
    """The axes along which the values around a move, or a rank's position, are local."""
    move = move_of(node)
    named: Any = node.args[0] if is_axis_index(node) else () if move is None else move.manual
    return frozenset(named)


def is_edge(node: fx.Node) -> bool:
    """Whether a graph node stands between a global value and its shards."""
    return _BY_TARGET.get(node.target) in (Enter, Leave)


def is_move(target: Any) -> bool:
    """Whether an operation is that of a move."""
    return target in _BY_TARGET


def move_of(node: fx.Node) -> Move | None:
    """The move a graph node stands for, or None for other nodes."""
    kind = _BY_TARGET.get(node.target)
    return None if kind is None else _made(kind, node.args[1:])
