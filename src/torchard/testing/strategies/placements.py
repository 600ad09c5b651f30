"""Meshes, and specs for all leaves of a tree."""

from __future__ import annotations

from typing import Any

import optree
from hypothesis import strategies as st

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.sharding import Mesh
from torchard.sharding.testing import meshes, specs

__all__ = ["meshes", "specs_for"]


@checked
def specs_for(values: Any, mesh: Mesh, *, fused: bool = False) -> st.SearchStrategy[Any]:
    """A hypothesis strategy of specs for all tensors of a pytree, for ``in_specs`` or ``out_specs``.

    Every axis splits at most one dim of a tensor, several axes may split the same dim, and dims may be
    uneven or smaller than the axis.

    Args:
        values: a pytree of tensors, of `torchard.ShapeDtype` or of shapes, which are tuples of ints.
            Other leaves get ``P()``.
        mesh: the mesh whose axes are used.
        fused: also draw specs with factors inside a dim (`torchard.P.factors`).

    Returns:
        A strategy of pytrees of the same structure with a `torchard.P` at each leaf, which shrinks
        towards ``P()``.

    >>> import torch, torchard as ta
    >>> from hypothesis import find
    >>> from torchard.testing import strategies as ts
    >>> mesh = ta.Mesh({"dp": 2, "tp": 3}, virtual=True)
    >>> params = {"w": torch.ones(4, 5), "b": (5,)}
    >>> find(ts.specs_for(params, mesh), lambda specs: "tp" in specs["w"].entries)
    {'w': P('tp'), 'b': P()}
    """
    leaves, structure = optree.tree_flatten(
        values, is_leaf=_is_shape, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    each = [specs(_shape_of(leaf), mesh, fused=fused) for leaf in leaves]
    return st.tuples(*each).map(lambda drawn: tree.unflatten(structure, drawn))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int for n in value)


def _shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf if _is_shape(leaf) else getattr(leaf, "shape", ()))
