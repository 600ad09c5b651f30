"""Conversion to and from torch's DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchard.functional.core.arguments import checked
from torchard.sharding.layouts.layout import Layout, Sub
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.place import MeshTensor, PlacementError
from torchard.sharding.values.placement import MeshPlacement

__all__ = ["from_dtensor", "to_dtensor"]


@checked
def to_dtensor(value: MeshTensor) -> DTensor:
    """Convert a MeshTensor to a DTensor with the same shards on the same DeviceMesh; nothing is sent.

    Args:
        value: a MeshTensor on a mesh of processes.

    Returns:
        A DTensor.

    Raises:
        PlacementError: the mesh is virtual, or the layout has no counterpart (factors inside a dim, or
            axes of a dim in an order other than the mesh's); redistribute the value first.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> x = ta.to_dtensor(ta.place(torch.arange(4.0), mesh, ta.P("dp")))
    >>> x.placements, x.to_local()
    ((Shard(dim=0),), tensor([0., 1.]))
    """
    mesh = value.mesh
    if mesh.device_mesh is None:
        raise PlacementError(f"{value} is on a virtual mesh; a DTensor needs process groups.")
    layout = value.layout
    placements: list[Placement] = [Replicate() for _ in mesh.axes]
    for d, dim in enumerate(layout.dims):
        axes = [a for sub in dim for a in sub.axes]
        if len(dim) != 1 or axes != sorted(axes, key=mesh.axes.index):
            raise PlacementError(
                f"{value} splits dim {d} in a way that a DTensor cannot express; redistribute it to "
                "plain axis names in mesh order first."
            )
        for axis in axes:
            placements[mesh.axes.index(axis)] = Shard(d)
    return DTensor.from_local(
        value.local,
        mesh.device_mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=_strides(value.shape),
    )


@checked
def from_dtensor(value: DTensor, mesh: Mesh | None = None) -> MeshTensor:
    """Convert a DTensor to a MeshTensor with the same shards; Partial placements are reduced first.

    Args:
        value: a DTensor.
        mesh: the Mesh of the result; by default one over the DTensor's DeviceMesh.

    Returns:
        A MeshTensor.

    Raises:
        MeshError: the DTensor's mesh has no dim names.
        PlacementError: the meshes differ.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> dist.init_process_group("gloo")
    >>> mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> ta.from_dtensor(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    MeshTensor([4], torch.float32, P('dp'), Mesh(dp=2))
    """
    mesh = Mesh(value.device_mesh) if mesh is None else mesh
    if mesh.device_mesh != value.device_mesh:
        raise PlacementError(f"the DTensor is on {value.device_mesh}, not on {mesh}")
    if any(isinstance(p, Partial) for p in value.placements):
        reduced = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
        value = value.redistribute(placements=reduced)
    axes: list[tuple[str, ...]] = [()] * value.ndim
    for name, placement in zip(mesh.axes, value.placements, strict=True):
        if type(placement) is Shard:
            axes[placement.dim % value.ndim] += (name,) if mesh.shape[name] > 1 else ()
        elif not isinstance(placement, Replicate):
            raise PlacementError(f"{placement} has no counterpart in a spec; redistribute it first")
    dims = tuple((Sub(n, a),) for n, a in zip(value.shape, axes, strict=True))
    return MeshTensor(MeshPlacement.of(mesh, Layout(dims)), [value.to_local()])


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
