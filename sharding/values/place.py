"""Placed values: global values held as shards over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked, written
from torchard.functional.core.errors import DonatedError
from torchard.functional.core.placed import Facts, is_placed
from torchard.functional.core.user_lines import asked_by_user
from torchard.functional.tracing.trace_state import active
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.values.mapped import Flattened, ShardReading, rebuilt
from torchard.sharding.values.mesh import Mesh, PlacementError
from torchard.sharding.values.operators import Operators
from torchard.sharding.values.placement import METHODS, MeshPlacement
from torchard.sharding.values.spec import P, layout_of, spec_of
from torchard.sharding.values.store_allgather import exchange

__all__ = ["METHODS", "MeshPlacement", "MeshTensor", "PlacementError"]


@written("place(x, mesh, P('tp'))")
class MeshTensor(Operators):
    """A global value held as shards over a mesh. Made by `place`, ``from_local`` or ``from_shards``.

    It is a pytree node around the *distinct* shards of this process: one under process groups, all
    distinct ones on a virtual mesh, never copies. Leafwise gradients and norms therefore count a value
    once. It is immutable. Outside a transform, each operation on it runs as a separate program, forward
    and under autograd, so every rank must call it; 0-d results are plain tensors. Put several operations
    in a function under `shard`, which plans them together.

    Args:
        held: the placement (internal).
        parts: the shards, in the order of their coordinates.

    Attributes:
        mesh: the mesh.
        shape: the global shape.
        spec: how the value is split; axes of size one are left out.
        parts: the shards of this process.
        reading: how `torch.func` left the dims of the parts; by default, as stated by ``held``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> x = ta.place(torch.arange(6.0).view(3, 2), mesh, ta.P("dp"))
    >>> x
    MeshTensor([3, 2], torch.float32, P('dp', None), Mesh(dp=2, virtual))
    >>> [tuple(part.shape) for part in x.parts]                    # uneven, as by torch.chunk
    [(2, 2), (1, 2)]
    >>> (2 * x).sum()
    tensor(30.)
    >>> x.redistribute(ta.P(None, "dp")).full()
    tensor([[0., 1.],
            [2., 3.],
            [4., 5.]])
    >>> isinstance(x, ta.MeshTensor), isinstance(x, torch.Tensor)
    (True, False)
    """

    __slots__ = ("_dead", "_facts", "_reading", "parts")

    def __init__(
        self, held: MeshPlacement, parts: Sequence[torch.Tensor], reading: ShardReading | None = None
    ) -> None:
        self._reading = ShardReading(held, held) if reading is None else reading
        self.parts = tuple(parts)
        self._facts: Facts | None = None
        self._dead = False

    @classmethod
    @checked
    def from_local(
        cls, part: torch.Tensor, mesh: Mesh, spec: P, *, shape: Sequence[int] | None = None
    ) -> MeshTensor:
        """Make a value from one shard per rank, such as data that each rank loads.

        Args:
            part: this rank's shard.
            mesh: a mesh of processes.
            spec: how the value is split.
            shape: the global shape. By default the ranks exchange the shapes of their shards, so every
                rank must call.

        Returns:
            A MeshTensor.

        Raises:
            PlacementError: the mesh is virtual (use ``from_shards``), or the shard does not have the
                shape that the spec gives this rank.
            ExchangeError: another rank did not call within ``mesh.timeout`` seconds.

        >>> # torchrun --nproc-per-node 2
        >>> import torch, torch.distributed as dist, torchard as ta
        >>> dist.init_process_group("gloo")
        >>> mesh = ta.Mesh({"dp": 2})
        >>> x = ta.MeshTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, ta.P("dp"))
        >>> x.full()
        tensor([0., 0., 1., 1.])
        """
        if mesh.virtual:
            raise PlacementError(
                f"from_local takes one rank's shard, but {mesh} has all ranks in this process; "
                "use MeshTensor.from_shards with one tensor for each distinct shard."
            )
        if shape is None:
            shape = _whole_shape(part, mesh, spec)
        return cls.from_shards([part], mesh, spec, shape=shape)

    @classmethod
    @checked
    def from_shards(
        cls, parts: Sequence[torch.Tensor], mesh: Mesh, spec: P, *, shape: Sequence[int]
    ) -> MeshTensor:
        """Make a value from the distinct shards of this process.

        Args:
            parts: the shards, in the order of their coordinates; one under process groups.
            mesh: the mesh.
            spec: how the value is split.
            shape: the global shape.

        Returns:
            A MeshTensor.

        Raises:
            PlacementError: the number or the shapes of the shards do not fit the spec.

        >>> import torch, torchard as ta
        >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
        >>> x = ta.MeshTensor.from_shards([torch.zeros(2), torch.ones(1)], mesh, ta.P("dp"), shape=(3,))
        >>> x.full()
        tensor([0., 0., 1.])
        """
        held = MeshPlacement.of(mesh, layout_of(spec, shape, mesh))
        if len(parts) != held.width:
            raise PlacementError(
                f"a value with spec {spec} on {mesh} has {held.width} distinct shards in this "
                f"process; {len(parts)} were given."
            )
        for i, (part, want) in enumerate(zip(parts, held.shapes, strict=True)):
            if tuple(part.shape) != want:
                who = f"shard {i}" if mesh.virtual else f"the shard of rank {dist.get_rank()}"
                raise PlacementError(_misfit(who, part.shape, spec, shape, mesh, want))
        return cls(held, parts)

    # -- attributes -------------------------------------------------------------------------------

    def _read(self) -> Facts:
        """The attributes of the global value, checked; vmap may have added a leading dim."""
        if self._dead:
            raise DonatedError(
                f"this MeshTensor (spec {self._held.spec}) was donated to a jitted "
                "function, which reused its memory; use the value that the call returned."
            )
        if self._facts is None:
            self._facts = self._check()
        return self._facts

    @property
    def _held(self) -> MeshPlacement:
        return self._reading.now or self._reading.base

    def _check(self) -> Facts:
        held, first = self._reading.now, self.parts[0]
        # Every call reads each of its arguments, so the usual case, of one part, takes few steps.
        shapes = (first.shape,) if len(self.parts) == 1 else tuple(x.shape for x in self.parts)
        if held is None or shapes != held.shapes:
            raise PlacementError(self._unreadable())
        return Facts(held.size, first.dtype, first.device, held, self.parts)

    def _unreadable(self) -> str:
        held = self._held
        return (
            f"a MeshTensor on {held.mesh} with spec {held.spec} holds shards of shapes "
            f"{[list(p.shape) for p in self.parts]}, not {[list(s) for s in held.shapes]}: a function "
            "of torch, such as torch.func.jacrev or a tree_map, replaced its shards by values that "
            "cannot be combined. Transform the function that takes global values: shard(jacrev(f)), "
            "shard(vmap(f)), tree.map."
        )

    def __torchard_placed__(self) -> Facts:
        return self._facts or self._read()  # a donated value has none

    def __torchard_donate__(self) -> None:
        """Release the shards to the call that they are donated to, which can then free them."""
        self._dead, self.parts, self._facts = True, (), None

    @property
    def mesh(self) -> Mesh:
        return self._held.mesh

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self._read().shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._read().dtype

    @property
    def device(self) -> torch.device:
        return self._read().device

    @property
    def spec(self) -> P:
        """The spec, without axes of size one."""
        return spec_of(self.layout)

    @property
    def layout(self) -> Layout:
        """The layout, with sizes."""
        facts = self._read()
        layout: Layout = facts.placement.layout(facts.shape)
        return layout

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard (on a virtual mesh, use ``parts``)."""
        if self.mesh.virtual:
            raise PlacementError(f"{self.mesh} has all ranks in this process; use .parts")
        return self._read().parts[0]

    def full(self) -> torch.Tensor:
        """The full value as a plain tensor on every rank. Every rank must call it."""
        return METHODS.full(self)

    def redistribute(self, spec: P) -> MeshTensor:
        """The same value with another spec. Every rank must call it."""
        moved: MeshTensor = METHODS.redistribute(self, spec)
        return moved

    def __repr__(self) -> str:
        if self._dead:
            return f"MeshTensor(donated, {self.mesh})"
        return f"MeshTensor({list(self.shape)}, {self.dtype}, {self.spec}, {self.mesh})"

    # -- autograd ----------------------------------------------------------------------------------

    def detach(self) -> MeshTensor:
        """The same value, through which no gradient flows."""
        state = active()
        if state is not None:
            return state.lift(self).detach()  # type: ignore[return-value]
        held, parts = self._read()[3:]
        return MeshTensor(held, [part.detach() for part in parts])

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self._read().parts)

    def requires_grad_(self, requires_grad: bool = True) -> MeshTensor:
        """Have autograd record operations on the shards, so that ``backward()`` sets ``.grad``."""
        for part in self._read().parts:
            part.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> MeshTensor | None:
        """The gradient that ``backward()`` accumulated, placed as this value is."""
        held, parts = self._read()[3:]
        gradients = [part.grad for part in parts]
        if any(part is None for part in gradients):
            return None
        return MeshTensor(held, gradients)  # type: ignore[arg-type]

    @grad.setter
    def grad(self, value: MeshTensor | None) -> None:
        given = [None] * len(self.parts) if value is None else value.parts
        for part, gradient in zip(self.parts, given, strict=True):
            part.grad = gradient

    def backward(self, gradient: MeshTensor | None = None, **options: Any) -> None:
        """Like `torch.Tensor.backward`; ``gradient`` is a MeshTensor placed as this one is."""
        torch.autograd.backward(self, gradient, **options)  # type: ignore[arg-type]


def _misfit(
    who: str, have: Sequence[int], spec: P, shape: Sequence[int], mesh: Mesh, want: Sequence[int]
) -> str:
    """The message for a shard that does not have the shape that its spec gives it."""
    return (
        f"{who} has shape {list(have)}, but spec {spec} of a value of shape {list(shape)} on {mesh} "
        f"gives it {list(want)} (uneven dims split as torch.chunk does)."
    )


def _whole_shape(part: torch.Tensor, mesh: Mesh, spec: P) -> tuple[int, ...]:
    """The global shape, from the shards of all ranks; every rank raises the same error if one misfits."""
    axes = layout_of(spec, part.shape, mesh)  # only the axes of each dim are used, not sizes
    mine = [str(part.dtype).removeprefix("torch."), *part.shape]
    known = exchange(mesh, f"the shape of its shard with spec {spec}", mine)
    ranks = mesh.ranks
    (dtype, *first), kinds = known[0], [(found[0], len(found) - 1) for found in known]
    for rank, kind in zip(ranks, kinds, strict=True):
        if kind != kinds[0]:
            raise PlacementError(
                f"the shard of rank {rank} is {kind[0]} with {kind[1]} dims, the shard of rank "
                f"{ranks[0]} is {dtype} with {len(first)}: pass shards of the same dtype and number of "
                "dims on every rank."
            )
    shape = []
    for d, n in enumerate(first):
        split = [a for sub in axes.dims[d] for a in sub.axes]
        sizes = [
            known[mesh.rank_of(at)][d + 1]
            for at in mesh.all_coords()
            if not any(at[a] for a in mesh.axes if a not in split)
        ]
        shape.append(sum(sizes) if split else n)
    layout = layout_of(spec, shape, mesh)
    for at, rank, found in zip(mesh.all_coords(), ranks, known, strict=True):
        want = layout.local_shape(at, mesh.shape)
        if tuple(found[1:]) != tuple(want):
            who = f"the shard of rank {rank}"
            raise PlacementError(_misfit(who, found[1:], spec, shape, mesh, want))
    return tuple(shape)


class _Whole:
    """The static part of a value that is read during a trace, where it is one traced tensor."""

    def __repr__(self) -> str:
        return "whole"


_WHOLE = _Whole()


def _flatten(value: MeshTensor) -> tuple[tuple[torch.Tensor, ...], Flattened | _Whole]:
    state = active()
    if state is not None:
        return (state.lift(value),), _WHOLE
    if value._dead:
        value._read()  # raises
    if asked_by_user(*_TREES):
        raise PlacementError(
            f"{value!r} was flattened: torch.utils._pytree and optree look into placed values, since "
            "torch's transforms differentiate their shards. Use torchard.tree, for which a placed "
            "value is one leaf; full(tree) gathers it, and x.parts has this process's tensors."
        )
    return value.parts, Flattened(value._reading, value.parts)


# Files of functions of trees.
_TREES = ("utils/_pytree.py", "core/tree_nodes.py", "optree/ops.py")


def _is_tree(value: Any) -> bool:
    """Whether a value is several values, such as the Jacobians of a shard with respect to parameters."""
    found = tree.leaves(value, is_leaf=is_placed)
    values = all(isinstance(x, torch.Tensor) or is_placed(x) for x in found)
    return values and not any(x is value for x in found)


def _unflatten(
    flattened: Flattened | _Whole, parts: Sequence[Any]
) -> Any:
    if isinstance(flattened, _Whole):
        return parts[0]
    if parts and all(map(_is_tree, parts)):
        return tree.map(
            lambda *values: _unflatten(flattened, values), *parts, is_leaf=is_placed
        )
    reading, shards = rebuilt(flattened, list(parts))
    return MeshTensor(reading.base, shards, reading)


tree.register(MeshTensor, _flatten, _unflatten)
METHODS.wrap = MeshTensor
