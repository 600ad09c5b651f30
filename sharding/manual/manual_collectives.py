"""Moves: the collectives of manual mode, and the edges between global and local values, as data.

Every move except pmax and pmin is a linear map with a transpose and a batched form; it defines the shape
of its result and the axes over which the result varies. In a traced program a move is one opaque
operation, from whose arguments ``move_of`` restores it; ``lower_manual.py`` lowers its collective
(`Move.collective`). The transposes are the same as in JAX's shard_map with check_vma=True.
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
    """A collective, or an edge of the region in which values are local.

    Attributes:
        manual: the axes along which values in the region are local; the move is over some of them.
        op, schema: the name of its operator in the namespace ``torchard``, and the operator's arguments.
        takes: whether the operand must be "varying" or "invariant" over ``axes``.
        gives: whether the result is "varying" or "invariant" over them.
    """

    manual: Axes
    op: ClassVar[str]
    schema: ClassVar[str]
    takes: ClassVar[str] = "varying"
    gives: ClassVar[str] = "varying"

    @property
    def over(self) -> frozenset[str]:
        """The mesh axes of the move."""
        return frozenset(self.axes)  # type: ignore[attr-defined]

    @property
    def collective(self) -> CollectiveOp | None:
        """The collective on local values; None if the move changes only their type (varying, local).

        Its ``at`` and ``to`` refer to layouts in which the move's axes are the outermost of their dims.
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
        """The transpose, which is the move that cotangents take."""
        raise NotImplementedError

    def excess(self, varying: frozenset[str]) -> frozenset[str]:
        """The axes over which the operand varies but must not."""
        return varying & self.over if self.takes == "invariant" else frozenset()

    def batched(self) -> Move:
        """The same move on values with a new leading dim."""
        return self


def _grown(shape: Shape, dim: int, times: int) -> Shape:
    return (*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def _shrunk(shape: Shape, dim: int, times: int) -> Shape:
    return (*shape[:dim], shape[dim] // times, *shape[dim + 1 :])


@dataclass(frozen=True)
class _Edge(Move):
    """An edge between global and local values.

    Attributes:
        entries: for each dim the axes that split it, separated by commas.
        counts: for each dim the number of parts.
    """

    entries: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return tuple(a for entry in self.entries if entry for a in entry.split(","))

    def batched(self) -> Move:
        return replace(self, entries=("", *self.entries), counts=(1, *self.counts))


class Enter(_Edge):
    """From a global value to each rank's shard of it."""

    op, schema, takes = "enter", "str[] entries, int[] counts", "invariant"

    def shape(self, shape: Shape) -> Shape:
        return tuple(n // c for n, c in zip(shape, self.counts, strict=True))

    def transposed(self) -> Move:
        return Leave(self.manual, self.entries, self.counts)


class Leave(_Edge):
    """From the ranks' shards to their global value."""

    op, schema, gives = "leave", "str[] entries, int[] counts", "invariant"

    def shape(self, shape: Shape) -> Shape:
        return tuple(n * c for n, c in zip(shape, self.counts, strict=True))

    def transposed(self) -> Move:
        return Enter(self.manual, self.entries, self.counts)

    def excess(self, varying: frozenset[str]) -> frozenset[str]:
        return varying - self.over


@dataclass(frozen=True)
class _Over(Move):
    """A move over some mesh axes, the first outermost."""

    axes: Axes


class Vary(_Over):
    """From an invariant value to a varying one (pvary)."""

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
            f"p{self.which} has no derivative; detach() its operand (as for the maximum in a softmax), "
            "or take the maximum of an all_gather."
        )


@dataclass(frozen=True)
class _Along(_Over):
    """A move along one dim; ``size`` is the number of ranks."""

    size: int
    dim: int

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)

    def along(self, kind: type[_Along]) -> Move:
        """The move of another kind over the same axes and dim."""
        return kind(self.manual, self.axes, self.size, self.dim)


class _Concatenating(_Along):
    """A move whose result is the concatenation of the ranks' values."""

    @property
    def collective(self) -> AllGather:
        return AllGather(self.axes, (self.dim, 0))

    def shape(self, shape: Shape) -> Shape:
        return _grown(shape, self.dim, self.size)


class _Slicing(_Along):
    """A move whose result is the rank's slice of a dim."""

    def shape(self, shape: Shape) -> Shape:
        return _shrunk(shape, self.dim, self.size)


class Gather(_Concatenating):
    """The concatenation of the ranks' values, as a varying value."""

    op, schema = "all_gather", "str[] axes, int size, int dim"

    def transposed(self) -> Move:
        return self.along(Scatter)


class Scatter(_Slicing):
    """The sum over ranks, of which each rank keeps its slice."""

    op, schema = "psum_scatter", "str[] axes, int size, int dim"

    @property
    def collective(self) -> PsumScatter:
        return PsumScatter(self.axes, (self.dim, 0))

    def transposed(self) -> Move:
        return self.along(Gather)


class GatherWhole(_Concatenating):
    """The concatenation of the ranks' values, as an invariant value."""

    op, schema, gives = "all_gather_invariant", "str[] axes, int size, int dim", "invariant"

    def transposed(self) -> Move:
        return self.along(Slice)


class Slice(_Slicing):
    """Each rank's slice of an invariant value; nothing is sent."""

    op, schema, takes = "pslice", "str[] axes, int size, int dim", "invariant"

    @property
    def collective(self) -> LocalSlice:
        return LocalSlice(self.axes, (self.dim, 0))

    def transposed(self) -> Move:
        return self.along(GatherWhole)


@dataclass(frozen=True)
class Exchange(_Over):
    """Rank i's j-th part along ``split`` becomes rank j's i-th part along ``concat``."""

    size: int
    split: int
    concat: int
    op, schema = "all_to_all", "str[] axes, int size, int split, int concat"

    @property
    def collective(self) -> AllToAll:
        """The collective; if both dims are the same, the ranks are the outermost sub-dim."""
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
    """Rank ``targets[i]`` receives the value of ``sources[i]``; the others receive zeros."""

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


def _construct(kind: type[Move], arguments: tuple[Any, ...]) -> Move:
    """The move of a kind with an operator's arguments."""
    frozen = (tuple(a) if isinstance(a, (list, tuple)) else a for a in arguments)
    return kind(*frozen)


def _define(kind: type[Move]) -> None:
    """Define the operator of a kind of move, which is lowered before it runs."""

    def fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return x.new_empty(_construct(kind, arguments).shape(tuple(x.shape)))

    _library.define(f"{kind.op}(Tensor x, str[] manual, {kind.schema}) -> Tensor")
    for device in ("CPU", "CUDA"):  # traces ask for results of constants, which are unknown
        _library.impl(kind.op, lambda x, *arguments: fake(x.to("meta"), *arguments), device)
    torch.library.register_fake(f"torchard::{kind.op}", fake, lib=_library)


for _kind in _KINDS:
    _define(_kind)

_library.define("axis_index(str[] manual, str[] axes, *, Device device) -> Tensor")
torch.library.register_fake(
    "torchard::axis_index",
    lambda manual, axes, *, device: torch.empty((), dtype=torch.int64, device=device),
    lib=_library,
)
_BY_TARGET = {getattr(torch.ops.torchard, kind.op).default: kind for kind in _KINDS}
_INDEX: Any = torch.ops.torchard.axis_index.default


def axis_index_op(manual: Axes, axes: Axes, device: torch.device) -> torch.Tensor:
    """This rank's index along the axes, the first outermost: an int64 scalar that varies over them."""
    out: torch.Tensor = _INDEX(list(manual), list(axes), device=device)
    return out


def is_axis_index(node: fx.Node) -> bool:
    """Whether a graph node is an axis_index."""
    return node.target is _INDEX


def manual_around(node: fx.Node) -> frozenset[str]:
    """The axes along which the values around a move or an axis_index are local."""
    move = move_of(node)
    named: Any = node.args[0] if is_axis_index(node) else () if move is None else move.manual
    return frozenset(named)


def is_edge(node: fx.Node) -> bool:
    """Whether a graph node is an edge between a global value and its shards."""
    return _BY_TARGET.get(node.target) in (Enter, Leave)


def is_move(target: Any) -> bool:
    """Whether an operator is a move's."""
    return target in _BY_TARGET


def move_of(node: fx.Node) -> Move | None:
    """The move of a graph node; None for other nodes."""
    kind = _BY_TARGET.get(node.target)
    return None if kind is None else _construct(kind, node.args[1:])
