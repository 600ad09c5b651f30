"""The placement of a value on a mesh: how its shards make up the global value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.programs.program import Rewrite
from torchard.sharding.layouts.layout import Dim, Layout, Sub
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P, spec_of

__all__ = ["METHODS", "MeshPlacement"]


class Methods:
    """Methods of placements and of placed values whose implementations import this module.

    Attributes:
        wrap: the MeshTensor with a placement and parts; set by `place`.
        rewrite: the rewrite of a program with a value on a mesh; set by `shard_rewrite`.
        full, redistribute: the methods of MeshTensor; set by `redistribute`.
    """

    wrap: Callable[[MeshPlacement, Sequence[torch.Tensor]], Any]
    rewrite: Callable[[Mesh], Rewrite]
    full: Callable[[Any], torch.Tensor]
    redistribute: Callable[[Any, P], Any]


METHODS = Methods()


@dataclass(frozen=True)
class MeshPlacement:
    """The placement of a global value.

    Attributes:
        mesh: the mesh.
        dims: the sub-dims of each dim, with the axes that split them.
        pending: the axes over which the value is pending, with the reductions.
        home: axes along which only one coordinate has the value, with that coordinate.
        lead: the number of leading dims that vmap added, whose sizes are not known here.
    """

    mesh: Mesh
    dims: tuple[Dim, ...]
    pending: tuple[tuple[str, str], ...] = ()
    lead: int = 0
    home: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        key = (self.mesh, self.dims, self.pending, self.lead, self.home)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __repr__(self) -> str:
        """The placement as plans and printed programs show it."""
        pending = f", pending {dict(self.pending)}" if self.pending else ""
        return f"{self.spec} on {self.mesh}{pending}"

    @staticmethod
    def of(mesh: Mesh, layout: Layout) -> MeshPlacement:
        """The placement of a value with a given layout."""
        return MeshPlacement(mesh, layout.dims, layout.pending, home=layout.home)

    @property
    def spec(self) -> P:
        """The spec, without leading dims that vmap added."""
        return spec_of(self._bare)

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which parts differ: the value is split or pending over them."""
        split = {a for dim in self.dims for sub in dim for a in sub.axes}
        return tuple(sorted(split | {a for a, _ in self.pending}))

    @functools.cached_property
    def width(self) -> int:
        """The number of parts: one under process groups, all distinct shards on a virtual mesh."""
        if not self.mesh.virtual:
            return 1
        n = 1
        for axis in self.axes:
            n *= self.mesh.shape[axis]
        return n

    def batched(self) -> MeshPlacement:
        """The placement of the value with a new unsplit leading dim."""
        return replace(self, lead=self.lead + 1)

    def layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a value of this global shape."""
        lead = tuple((Sub(n),) for n in shape[: self.lead])
        return Layout((*lead, *self.dims), self.pending, self.home)

    @functools.cached_property
    def places(self) -> list[dict[str, int]]:
        """The coordinate of each part of this process, in order."""
        if self.mesh.coords is not None:
            return [self.mesh.coords]
        seen: dict[tuple[int, ...], dict[str, int]] = {}
        for at in filter(self._bare.is_at, self.mesh.all_coords()):
            seen.setdefault(tuple(at[a] for a in self.axes), at)
        return list(seen.values())

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each part, without leading dims that vmap added."""
        return tuple(self._bare.local_shape(at, self.mesh.shape) for at in self.places)

    @functools.cached_property
    def size(self) -> torch.Size:
        """The global shape, without leading dims that vmap added."""
        return torch.Size(self._bare.shape)

    @functools.cached_property
    def _bare(self) -> Layout:
        """The layout without leading dims that vmap added."""
        return Layout(self.dims, self.pending, self.home)

    def wrap(self, parts: Sequence[torch.Tensor]) -> Any:
        """The MeshTensor of these parts."""
        return METHODS.wrap(self, parts)

    def rewrite(self) -> Rewrite:
        """The rewrite that a program with such a value needs, which shards it on the value's mesh."""
        return METHODS.rewrite(self.mesh)
