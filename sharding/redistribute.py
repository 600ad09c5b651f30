"""Moving values onto a mesh, off it, and from one spec to another."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from numbers import Number
from typing import Any

import optree
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed
from torchard.functional.tracing.trace_state import active
from torchard.sharding.layouts.layout import Coords, Layout, chunk
from torchard.sharding.lowering.plan_consistency import agree_on_values
from torchard.sharding.shard_rewrite import Shard
from torchard.sharding.values.axis_rules import AxisRules, resolved
from torchard.sharding.values.constrain import constrain
from torchard.sharding.values.mesh import Mesh, MeshError
from torchard.sharding.values.place import MeshTensor, PlacementError
from torchard.sharding.values.placement import METHODS, MeshPlacement
from torchard.sharding.values.spec import P, SpecError, layout_of
from torchard.sharding.values.spectree import broadcast
from torchard.sharding.values.store_allgather import exchange

__all__ = ["full", "place", "redistribute"]


@checked
def place(
    values: Any,
    mesh: Mesh,
    specs: Any,
    *,
    rules: AxisRules | None = None,
    check_replicated: bool = True,
) -> Any:
    """Put a tree of global tensors on a mesh; every rank holds only its shards.

    Args:
        values: a pytree. Tensors are placed, MeshTensors redistributed, other leaves returned unchanged.
        mesh: where to put them.
        specs: a pytree prefix of ``values`` with a `P` at each leaf.
        rules: a mapping from names of dims in the specs to axes.
        check_replicated: compare the tensors across ranks by checksum; they must be the same on each.

    Returns:
        The tree with MeshTensors in place of tensors.

    Raises:
        ReplicaMismatch: ranks passed different tensors.
        SpecError: ``specs`` is not a prefix of ``values``, or a spec does not fit its value.
        PlacementError: a tensor is sparse.
        MeshError: a MeshTensor is on a different mesh.
        TypeError: an array is not a tensor, or there is no tensor in ``values``.

    Source: ``jax.device_put``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> params = {"w": torch.ones(4, 6), "b": torch.ones(4)}
    >>> placed = ta.place(params, mesh, {"w": ta.P("tp"), "b": ta.P()})
    >>> placed["w"].spec, [tuple(part.shape) for part in placed["w"].parts]
    (P('tp', None), [(2, 6), (2, 6)])
    """
    leaves, structure = optree.tree_flatten(
        values, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    shape = structure.unflatten([object() for _ in leaves])
    wanted = broadcast(resolved(specs, rules, mesh, "specs"), shape, "specs", "the values")
    paths = tree.paths(shape, "values")
    _check_placeable(leaves, paths)
    if check_replicated and active() is None:
        agree_on_values(mesh, "place", dict(zip(paths, leaves, strict=True)))
    placed, errors = [], []
    for leaf, spec, path in zip(leaves, wanted, paths, strict=True):
        try:
            placed.append(_placed(leaf, mesh, spec or P(), path))
        except SpecError as error:
            errors.append(str(error))
    if errors:
        raise SpecError("\n".join(errors))
    return structure.unflatten(placed)


def _check_placeable(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise TypeError for an array that is not a tensor, and for a tree without any tensor."""
    for leaf, path in zip(leaves, paths, strict=True):
        is_tensor = isinstance(leaf, torch.Tensor) or is_placed(leaf)
        if not is_tensor and hasattr(leaf, "__array__") and not isinstance(leaf, Number):
            raise TypeError(
                f"place: {path} is a {type(leaf).__name__}, which is not a tensor; place "
                "torch.as_tensor(...) of it."
            )
    present = [leaf for leaf in leaves if leaf is not None]
    if present and not any(isinstance(x, torch.Tensor) or is_placed(x) for x in present):
        raise TypeError(
            f"place: there is no tensor in values, only {type(present[0]).__name__}; pass a tensor, or "
            "dicts, lists and tuples of them."
        )


def _placed(leaf: Any, mesh: Mesh, spec: P, path: str) -> Any:
    if isinstance(leaf, MeshTensor):
        if leaf.mesh != mesh:
            raise MeshError(
                f"{path} is on {leaf.mesh}, not on {mesh}: place its full value, which .full() returns."
            )
        return redistribute(leaf, spec)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided:
        raise PlacementError(
            f"{path} has the layout {leaf.layout}, which cannot be split into shards; place its values "
            "and indices, or x.to_dense()."
        )
    layout = layout_of(spec, leaf.shape, mesh, path)
    if active() is not None:
        return constrain(leaf, spec)  # inside a trace values are global, and a spec is a constraint
    held = MeshPlacement.of(mesh, layout)
    if layout.is_replicated and not layout.home:
        return MeshTensor(held, [leaf.clone()])
    if leaf.requires_grad or internals.has_transforms():
        return _mover(mesh, spec, (leaf.shape, leaf.dtype))(leaf)
    # Copies, which neither keep the full value alive nor share memory with it.
    return MeshTensor(held, [cut(leaf, layout, at, mesh).clone() for at in held.places])


def cut(value: torch.Tensor, layout: Layout, at: Coords, mesh: Mesh) -> torch.Tensor:
    """The shard of a global value at a coordinate."""
    if not layout.is_at(at):
        return value.new_empty(layout.local_shape(at, mesh.shape))
    subs = [sub for dim in layout.dims for sub in dim]
    view = value.reshape([sub.size for sub in subs])
    for d, sub in enumerate(subs):
        own = chunk(sub.size, sub.axes, at, mesh.shape)
        view = view.narrow(d, own.start, len(own))
    return view.reshape(layout.local_shape(at, mesh.shape))


def full(value: MeshTensor) -> torch.Tensor:
    """The full value on every rank. Every rank must call it."""
    _agree(value, "full()")
    whole = _mover(value.mesh, P(), value._read()[:4])(value)
    return whole.parts[0] if isinstance(whole, MeshTensor) else whole  # replicated already


@checked
def redistribute(value: MeshTensor, spec: P) -> MeshTensor:
    """Move a placed value to another spec, by the cheapest collectives. Every rank must call it.

    Args:
        value: a MeshTensor.
        spec: the new spec.

    Returns:
        A MeshTensor.

    Raises:
        SpecError: the spec does not fit the value.
        ExchangeError: another rank did not call within ``mesh.timeout`` seconds.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> rows = ta.place(torch.arange(4).view(2, 2), mesh, ta.P("tp"))
    >>> ta.redistribute(rows, ta.P(None, "tp")).parts
    (tensor([[0],
            [2]]), tensor([[1],
            [3]]))
    """
    layout = layout_of(spec, value.shape, value.mesh)
    _agree(value, f"redistribute(to {spec})")
    moved = _mover(value.mesh, spec, value._read()[:4])(value)
    if isinstance(moved, MeshTensor):
        return moved
    return MeshTensor(MeshPlacement.of(value.mesh, layout), [moved])


def _agree(value: MeshTensor, what: str) -> None:
    """Check that every rank makes this call: a rank on its own would wait in a collective."""
    if not value.mesh.virtual and value.mesh.size > 1 and (value.layout.axes or value.layout.home):
        exchange(value.mesh, f"that it called {what} on a value of shape {list(value.shape)}", what)


@functools.lru_cache(maxsize=1024)
def _mover(mesh: Mesh, spec: P, kind: Hashable) -> Transformed:
    """The transform that moves values of a kind to a spec; like any transform, it is differentiable."""
    return Transformed(torch.clone, (Shard(mesh, None, spec),))


METHODS.full, METHODS.redistribute = full, redistribute
