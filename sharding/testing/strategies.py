"""Hypothesis strategies of meshes, specs and layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

from torchard.sharding.layouts.layout import Dim, Layout, Sub
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P

__all__ = ["layouts", "meshes", "random_spec", "specs"]

_NAMES = ("dp", "tp", "pp", "ep")


def meshes(max_ranks: int = 8, max_axes: int = 3) -> st.SearchStrategy[Mesh]:
    """A hypothesis strategy of virtual meshes, including axes of size one.

    Args:
        max_ranks: the maximum number of ranks of a mesh.
        max_axes: the maximum number of axes, up to 4: dp, tp, pp, ep.

    Returns:
        A strategy of `Mesh`.

    >>> from hypothesis import find
    >>> from torchard.sharding.testing import meshes
    >>> find(meshes(), lambda mesh: mesh.size == 6 and len(mesh.axes) == 2)
    Mesh(dp=1, tp=6, virtual)
    """
    shapes = [
        shape
        for n in range(1, max_axes + 1)
        for shape in itertools.product(range(1, max_ranks + 1), repeat=n)
        if math.prod(shape) <= max_ranks
    ]
    shapes.sort(key=lambda shape: (math.prod(shape) == 1, len(shape), math.prod(shape)))
    axes = st.sampled_from(shapes).map(lambda shape: dict(zip(_NAMES, shape, strict=False)))
    # A call of Mesh, as which hypothesis prints it.
    return st.builds(Mesh, axes, virtual=st.just(True))


def specs(shape: Sequence[int], mesh: Mesh, *, fused: bool = False) -> st.SearchStrategy[P]:
    """A hypothesis strategy of valid specs for a shape.

    Every axis splits one dim or none. Several axes may split one dim, in any order, and need not divide
    its size.

    Args:
        shape: the shape of the value.
        mesh: the mesh.
        fused: also draw specs with factors inside a dim (`P.factors`).

    Returns:
        A strategy of `P`.

    >>> from hypothesis import find
    >>> import torchard as ta
    >>> from torchard.sharding.testing import specs
    >>> mesh = ta.Mesh({"dp": 2, "tp": 3}, virtual=True)
    >>> find(specs((5, 4), mesh), lambda spec: ("tp", "dp") in spec.entries[:1])
    P(('tp', 'dp'))
    """
    return st.randoms(use_true_random=False).map(
        lambda rng: random_spec(rng, shape, mesh, fused=fused)
    )


def random_spec(rng: Random, shape: Sequence[int], mesh: Mesh, *, fused: bool = False) -> P:
    """Draw a spec as `specs` does, without hypothesis.

    Args:
        rng: a ``random.Random``.
        shape: the shape of the value.
        mesh: the mesh.
        fused: also draw factors inside a dim.

    Returns:
        A P.

    >>> import random
    >>> import torchard as ta
    >>> from torchard.sharding.testing import random_spec
    >>> random_spec(random.Random(0), (4, 4), ta.Mesh({"dp": 2, "tp": 2}, virtual=True))
    P('dp')
    """
    at = _assigned(rng, len(shape), mesh)
    if fused and at and rng.randint(0, 4) == 4:
        return _named(rng, shape, at)
    entries = [tuple(axes) if len(axes) != 1 else axes[0] for axes in at]
    while entries and not entries[-1]:
        entries.pop()
    return P(*(e or None for e in entries))


def _assigned(rng: Random, rank: int, mesh: Mesh) -> list[list[str]]:
    """Random axes for each dim."""
    at: list[list[str]] = [[] for _ in range(rank)]
    axes = list(mesh.axes)
    rng.shuffle(axes)
    for axis in axes:
        dim = rng.choice(range(-1, rank))  # hypothesis shrinks to the first: no dim
        if dim >= 0:
            at[dim].append(axis)
    return at


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0] or [1]


def _named(rng: Random, shape: Sequence[int], at: list[list[str]]) -> P:
    """A spec in which every dim is two factors, either of which may have axes."""
    groups: list[str] = []
    names: dict[str, Any] = {}
    for d, (n, axes) in enumerate(zip(shape, at, strict=True)):
        outer = rng.choice(_divisors(n))
        cut = rng.randint(0, len(axes))
        groups.append(f"(o{d} i{d})")
        names[f"o{d}"] = (outer, *axes[:cut])
        names[f"i{d}"] = (n // outer, *axes[cut:])
    return P.factors(" ".join(groups), **names)


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, *, pending: bool = False) -> Layout:
    """A hypothesis strategy of layouts, whose dims may be products of sub-dims.

    Args:
        shape: the shape of the value.
        mesh: the mesh.
        pending: also draw layouts that are pending over axes that split no dim.

    Returns:
        A strategy of ``torchard.sharding.layouts.layout.Layout``.

    >>> from hypothesis import find
    >>> import torchard as ta
    >>> from torchard.sharding.testing import layouts
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> layout = find(layouts((4,), mesh, pending=True), lambda layout: bool(layout.pending))
    >>> layout.shape, layout.pending
    ((4,), (('tp', 'sum'),))
    """
    at = _assigned(draw(st.randoms(use_true_random=False)), len(shape), mesh)
    dims: list[Dim] = []
    for n, axes in zip(shape, at, strict=True):
        outer = draw(st.sampled_from(_divisors(n)))
        cut = draw(st.integers(0, len(axes)))
        is_undivided = n == 0 or draw(st.booleans())
        undivided = (Sub(n, tuple(axes)),)
        divided = (Sub(outer, tuple(axes[:cut])), Sub(n // outer, tuple(axes[cut:])))
        dims.append(undivided if is_undivided else divided)
    free = [a for a in mesh.axes if not any(a in axes for axes in at)]
    sums = [a for a in free if pending and draw(st.booleans())]
    return Layout(tuple(dims), tuple((a, "sum") for a in sorted(sums))).normal(mesh.sizes)
