"""Meshes: named axes over the processes of a job, or over ranks simulated in this process."""

from __future__ import annotations

import datetime
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchard.functional import torch_internals as internals
from torchard.functional.core.arguments import AtLeast, Like, checked, written

__all__ = ["Mesh", "MeshError", "PlacementError"]

# Torch's default, for process groups without their own timeout.
_PATIENCE = datetime.timedelta(minutes=30)


class MeshError(ValueError):
    """A mesh does not fit the processes that exist, or is used wrongly.

    >>> import torchard as ta
    >>> ta.Mesh({"dp": 2})
    Traceback (most recent call last):
        ...
    torchard.MeshError: Mesh(dp=2) needs 2 processes, but no process group exists. Call
        torch.distributed.init_process_group() under torchrun, or pass virtual=True to simulate
        every rank in this process.
    """


class PlacementError(ValueError):
    """A placed value is used in a way its placement does not allow.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.MeshTensor.from_shards([torch.ones(2), torch.ones(3)], mesh, ta.P("dp"), shape=(4,))
    Traceback (most recent call last):
        ...
    torchard.PlacementError: shard 1 has shape [3], but spec P('dp') of a value of shape [4] on
        Mesh(dp=2, virtual) gives it [2] (uneven dims split as torch.chunk does).
    """


@written('Mesh({"tp": 2})')
class Mesh:
    """Named axes over processes, or over ranks that are simulated in one process.

    Ranks are row-major: ``Mesh({"dp": 2, "tp": 4})`` is 8 ranks, tp innermost. Meshes with the same
    axes over the same processes are equal.

    Args:
        axes: the size of each axis, outermost first; or a ``DeviceMesh`` with named dims.
        virtual: simulate every rank in this process, in lockstep; needs no process group.
        device_type: the type of device that holds the ranks' tensors, such as ``"cuda"``.
        timeout: seconds after which a rank stops waiting for the others to plan, or to place a value;
            by default the timeout of the process group.
        transport: a `torchard.sharding.transports.Transport` that moves values between ranks; by default
            the library's own.

    Attributes:
        shape: the size of each axis, by name.
        coords: this rank's coordinate along each axis, by name; None on a virtual mesh.

    Raises:
        MeshError: no process group exists, or the sizes do not multiply to its world size; an axis has a
            size of 0, or a name that is not an identifier.

    >>> import torchard as ta
    >>> mesh = ta.Mesh({"dp": 2, "tp": 4}, virtual=True)
    >>> mesh
    Mesh(dp=2, tp=4, virtual)
    >>> mesh.axes, mesh.shape
    (('dp', 'tp'), {'dp': 2, 'tp': 4})
    """

    @checked
    def __init__(
        self,
        axes: Annotated[Mapping[str, int] | DeviceMesh, Like('{"dp": 2, "tp": 4}')],
        *,
        virtual: bool = False,
        device_type: str = "cpu",
        timeout: Annotated[float, AtLeast(0)] | None = None,
        transport: Any = None,
    ) -> None:
        _check_device_type(device_type)
        if isinstance(axes, DeviceMesh):
            shape = _device_mesh_axes(axes)
        else:
            shape = {name: int(size) for name, size in axes.items()}
        for name, size in shape.items():
            if not name.isidentifier() or size < 1:
                raise MeshError(
                    f"Mesh axis {name!r} has size {size}; the name of an axis must be an identifier, and "
                    "its size at least 1."
                )
        self.shape = shape
        self.virtual = virtual
        self.transport = transport
        self.sizes = tuple(shape.items())
        self.device_mesh: DeviceMesh | None = None
        self.coords: dict[str, int] | None = None
        if isinstance(axes, DeviceMesh):
            self.device_mesh = axes
        elif not virtual:
            _check_world(shape)
            self.device_mesh = init_device_mesh(
                device_type, tuple(shape.values()), mesh_dim_names=tuple(shape)
            )
            _wait_no_longer(self.device_mesh)
        self.host_group: Any = None
        self.patience = _PATIENCE
        if self.device_mesh is not None:
            self.coords = self._own_coordinate(self.device_mesh)
            self.patience = patience_of(dist.group.WORLD, self.device_mesh.device_type)
            self.host_group = _host_group(dist.group.WORLD, self.identity[2], self.patience)
            internals.let_gloo_wait()
        self.timeout = self.patience.total_seconds() if timeout is None else timeout

    def _own_coordinate(self, device_mesh: DeviceMesh) -> dict[str, int]:
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {device_mesh}")
        return dict(zip(self.shape, coordinate, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape.values())

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The processes' numbers in the process group, in the order of `all_coords`; () if virtual."""
        return () if self.device_mesh is None else tuple(self.device_mesh.mesh.flatten().tolist())

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names, outermost first."""
        return tuple(self.shape)

    def all_coords(self) -> list[dict[str, int]]:
        """The coordinate of every rank, in rank order."""
        ranges = (range(n) for n in self.shape.values())
        return [dict(zip(self.shape, at, strict=True)) for at in itertools.product(*ranges)]

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """The rank at a coordinate."""
        rank = 0
        for name, size in self.shape.items():
            rank = rank * size + coords[name]
        return rank

    def group(self, axes: Sequence[str]) -> Any:
        """The process group along ``axes`` through this rank, ordered with the first outermost."""
        if self.device_mesh is None:
            raise MeshError(f"{self} is virtual and has no process groups")
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        return _joint_group(self, tuple(axes))

    def pair(self, axis: str, one: int, other: int) -> Any:
        """The process group of this rank and its peer, at two coordinates along an axis.

        Every rank must call this, whatever its coordinate, in the same order; None for ranks at other
        coordinates.
        """
        return _pair_group(self, axis, min(one, other), max(one, other))

    @functools.cached_property
    def identity(self) -> tuple[Any, ...]:
        return self.sizes, self.virtual, self.ranks, self.transport

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self is other or self.identity == other.identity)

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        axes = ", ".join(f"{k}={v}" for k, v in self.shape.items())
        return f"Mesh({axes}{', virtual' if self.virtual else ''})"

    def __reduce__(self) -> Any:
        if not self.virtual:
            raise TypeError(
                f"{self} holds process groups and cannot be pickled; construct it in each process."
            )
        return _remake, (dict(self.shape), self.timeout, self.transport)


def _remake(axes: dict[str, int], timeout: float, transport: Any) -> Mesh:
    return Mesh(axes, virtual=True, timeout=timeout, transport=transport)


def _check_device_type(device_type: str) -> None:
    try:
        known = torch.device(device_type).type == device_type
    except RuntimeError:
        known = False
    if not known:
        raise MeshError(
            f"Mesh(device_type={device_type!r}): unknown device type; use one of torch's, without an "
            "index, such as 'cpu' or 'cuda'."
        )


def _device_mesh_axes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError("the DeviceMesh has no dim names; pass mesh_dim_names when you make it")
    return dict(zip(names, mesh.mesh.shape, strict=True))


def _check_world(shape: Mapping[str, int]) -> None:
    need = math.prod(shape.values())
    axes = ", ".join(f"{k}={v}" for k, v in shape.items())
    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"Mesh({axes}) needs {need} processes, but no process group exists. Call "
            "torch.distributed.init_process_group() under torchrun, or pass virtual=True to "
            "simulate every rank in this process."
        )
    world = dist.get_world_size()
    if need != world:
        raise MeshError(
            f"Mesh({axes}) has {need} ranks, but the process group has {world}. Make the sizes "
            f"multiply to {world}, or start {need} processes."
        )


@functools.cache
def _joint_group(mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """This rank's group over a product of axes. Every rank creates all of these groups, in one order."""
    others = [a for a in mesh.shape if a not in axes]
    assert mesh.device_mesh is not None
    ranks = mesh.device_mesh.mesh
    order = [mesh.axes.index(a) for a in (*others, *axes)]
    rows = ranks.permute(order).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    return _subgroup(mesh, rows.tolist())


@functools.cache
def _pair_group(mesh: Mesh, axis: str, one: int, other: int) -> Any:
    assert mesh.device_mesh is not None
    along = mesh.device_mesh.mesh.movedim(mesh.axes.index(axis), -1)
    return _subgroup(mesh, along[..., [one, other]].reshape(-1, 2).tolist())


def _subgroup(mesh: Mesh, rows: list[list[int]]) -> Any:
    """This rank's group among several."""
    assert mesh.device_mesh is not None
    timeout = internals.timeout_of(dist.group.WORLD, mesh.device_mesh.device_type)
    return dist.new_subgroups_by_enumeration(rows, timeout=timeout)[0]


def patience_of(group: Any, device_type: str) -> datetime.timedelta:
    """The timeout of a process group; torch's default for a backend that has none."""
    timeout = internals.timeout_of(group, device_type)
    return _PATIENCE if timeout is None else timeout


@functools.cache
def _host_group(world: Any, ranks: tuple[int, ...], patience: datetime.timedelta) -> Any:
    """A group of these processes that can send host tensors; None if no backend can.

    It is the default group if that uses gloo for them, and a new group otherwise, as under NCCL.
    """
    backends = dist.get_backend_config(world)
    if "cpu:gloo" in backends:
        return world
    if "fake" in backends:
        return None
    return dist.new_group(list(ranks), patience, "gloo", use_local_synchronization=True)


def _wait_no_longer(device_mesh: DeviceMesh) -> None:
    """Set the timeout of the axes' groups to the default group's; torch's default is half an hour."""
    timeout = internals.timeout_of(dist.group.WORLD, device_mesh.device_type)
    for group in device_mesh.get_all_groups():
        if timeout is not None and internals.timeout_of(group, device_mesh.device_type) != timeout:
            internals.set_timeout(group, device_mesh.device_type, timeout)


def default_device(mesh: Mesh) -> torch.device:
    """The device of a mesh's tensors."""
    return torch.device("cpu" if mesh.device_mesh is None else mesh.device_mesh.device_type)
