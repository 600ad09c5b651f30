"""Moving whole values: onto a mesh, off it, and from one spec to another."""

from __future__ import annotations

import functools
from typing import Any

import optree
import torch
from torch import fx

from torchard.functional import tree
from torchard.functional.codegen import compiled
from torchard.functional.program import Bound
from torchard.functional.signature import is_placed
from torchard.sharding.collectives import emit_step
from torchard.sharding.layout import Layout
from torchard.sharding.lower import Lowering
from torchard.sharding.mesh import Mesh, MeshError
from torchard.sharding.place import Held, MeshTensor
from torchard.sharding.reshard import plan
from torchard.sharding.spec import P, SpecError, layout_of
from torchard.sharding.spectree import broadcast
from torchard.sharding.transport import Lockstep, Wire

__all__ = ["full", "place", "redistribute"]


def place(values: Any, mesh: Mesh, specs: Any) -> Any:
    """A tree of global tensors as MeshTensors; every rank keeps its shards only.

    Args:
        values: a pytree; tensors are placed, MeshTensors redistributed, other leaves kept.
        specs: a pytree prefix of it with P at its leaves.

    Raises:
        SpecError: the specs are no prefix of the values, or one does not fit its value.
    """
    leaves, structure = optree.tree_flatten(
        values, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    shape = structure.unflatten([object() for _ in leaves])
    wanted = broadcast(specs, shape, "specs", "the values")
    paths = tree.paths(shape, "values")
    placed, errors = [], []
    for leaf, spec, path in zip(leaves, wanted, paths, strict=True):
        try:
            placed.append(_placed(leaf, mesh, spec or P(), path))
        except SpecError as error:
            errors.append(str(error))
    if errors:
        raise SpecError("\n".join(errors))
    return structure.unflatten(placed)


def _placed(leaf: Any, mesh: Mesh, spec: P, path: str) -> Any:
    if isinstance(leaf, MeshTensor):
        return redistribute(leaf, spec)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    layout = layout_of(spec, leaf.shape, mesh, path)
    held = Held.of(mesh, layout)
    whole = Held.of(mesh, Layout.replicated(leaf.shape))
    # A shard of its own: it must neither keep the whole alive nor share memory with it.
    parts = [
        part.clone() for part in _move(mesh, whole, held, tuple(leaf.shape), leaf.dtype)([leaf])
    ]
    return MeshTensor(held, parts)


def full(value: MeshTensor) -> torch.Tensor:
    """The whole value on every rank."""
    shape, dtype, _, held, parts = value._read()
    whole = Held.of(held.mesh, Layout.replicated(shape))
    return _move(held.mesh, held, whole, tuple(shape), dtype)(list(parts))[0]


def redistribute(value: MeshTensor, spec: P) -> MeshTensor:
    """The same value with another spec, moved by the cheapest collectives."""
    shape, dtype, _, held, parts = value._read()
    wanted = Held.of(held.mesh, layout_of(spec, shape, held.mesh))
    return MeshTensor(wanted, _move(held.mesh, held, wanted, tuple(shape), dtype)(list(parts)))


@functools.lru_cache(maxsize=1024)
def _move(mesh: Mesh, have: Held, want: Held, shape: tuple[int, ...], dtype: torch.dtype) -> Bound:
    """What moves a value of this shape from one placement to another."""
    if have.mesh != want.mesh:
        raise MeshError(f"cannot move a value from {have.mesh} to {want.mesh}; go through .full()")
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta.update(val=torch.empty(shape, dtype=dtype, device="meta"), layout=have.layout(shape))
    value = node
    for step in plan(have.layout(shape), want.layout(shape), mesh.sizes):
        value = emit_step(graph, value, step, node, mesh.sizes)
    graph.output((value,))
    coords = mesh.all_coords() if mesh.coords is None else [mesh.coords]
    transport = Lockstep() if mesh.virtual else Wire()
    return compiled(Lowering(graph, mesh, coords, transport).run())
