"""Initialization of parameters on a mesh, shard by shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from torchard.functional import random
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import is_placed
from torchard.sharding.redistribute import place
from torchard.sharding.shard import shard
from torchard.sharding.values.axis_rules import AxisRules, resolved
from torchard.sharding.values.constrain import constrain
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P, SpecError
from torchard.sharding.values.spectree import broadcast

__all__ = ["initialize"]

Init = Callable[[str, Tensor, torch.Size, torch.dtype], Tensor]


@checked
def initialize(
    init: Init,
    params: Any,
    mesh: Mesh,
    specs: Any,
    key: Tensor,
    *,
    rules: AxisRules | None = None,
) -> Any:
    """Initialize parameters on a mesh; each rank computes only its own shards.

    Values depend on the key and the parameter's name, not on the mesh or on other parameters.

    Args:
        init: ``init(name, key, shape, dtype)`` returns the full parameter with this (dotted) name. Every
            name has its own key, folded from ``key``.
        params: nested dicts of anything with a shape and a dtype: tensors on ``meta``, or `ShapeDtype`.
        mesh: as for `place`.
        specs: as for `place`.
        key: int64 ``[2]``, on the mesh's device.
        rules: as for `place`.

    Returns:
        A tree like ``params`` of MeshTensors.

    Raises:
        SpecError: specs do not fit, or ``init`` returned a tensor of a different shape or dtype; the
            message names the parameter.
        TypeError: a leaf of ``params`` has no shape or dtype; the message names it.
        PurityError: ``init`` draws from torch's global random state.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> shapes = {"w": ta.ShapeDtype((8, 4)), "b": ta.ShapeDtype((8,))}
    >>> def init(name, key, shape, dtype):
    ...     return torch.zeros(shape) if name == "b" else ta.nn.init_normal(key, shape)
    >>> params = ta.initialize(init, shapes, mesh, ta.P("tp"), ta.random.key(0))
    >>> params["w"]
    MeshTensor([8, 4], torch.float32, P('tp', None), Mesh(tp=2, virtual))
    >>> whole = ta.initialize(init, shapes, mesh, ta.P(), ta.random.key(0))
    >>> torch.equal(params["w"].full(), whole["w"].full())
    True
    """
    leaves, structure = optree.tree_flatten(
        params, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    names = [_dotted(path) for path in structure.paths()]
    for name, leaf in zip(names, leaves, strict=True):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"initialize: params{f' at {name!r}' if name else ''} is {leaf!r}, which has no shape "
                "and dtype; pass tensors (on meta, say) or ShapeDtypes."
            )
    random.check_key("initialize", key)
    specs = resolved(specs, rules, mesh, "specs")
    wanted = broadcast(specs, structure.unflatten(names), "specs", "params")
    given = [spec or P() for spec in wanted]

    # Folded here and not under shard, where this would double the number of operations to plan.
    numbers = torch.tensor([_number(name) for name in names], device=key.device)
    keys = random.fold_in(key.expand(len(names), 2), numbers)

    def draw(keys: Tensor) -> list[Tensor]:
        drawn = []
        for i, (name, leaf, spec) in enumerate(zip(names, leaves, given, strict=True)):
            value = init(name, keys[i], torch.Size(leaf.shape), leaf.dtype)
            _check_returned(name, value, leaf)
            # With an out_spec alone each rank would draw the whole value and slice it; a constraint is
            # propagated back to the draw.
            drawn.append(value if spec.is_replicated else constrain(value, spec))
        return drawn

    values = shard(draw, mesh, out_specs=given)(keys)
    return structure.unflatten(
        place(value, mesh, P(), check_replicated=False) if isinstance(value, Tensor) else value
        for value in values
    )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _number(name: str) -> int:
    """A hash of a name in 63 bits, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _check_returned(name: str, value: Tensor, leaf: Any) -> None:
    if tuple(value.shape) != tuple(leaf.shape) or value.dtype != leaf.dtype:
        raise SpecError(
            f"init({name!r}, ...) returned {value.dtype} {list(value.shape)}, but the parameter is "
            f"{leaf.dtype} {list(leaf.shape)}; return a tensor of the shape and dtype passed to init."
        )
