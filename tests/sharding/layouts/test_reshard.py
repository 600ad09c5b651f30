"""Layouts and reshards: what a coordinate owns, and moving values by the fewest bytes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from torchard.functional.execution.codegen import compiled
from torchard.sharding import Mesh
from torchard.sharding.layouts.layout import VARYING, Layout, Sub, chunk, merge, refine
from torchard.sharding.layouts.reshard import ReshardStep, cost, plan
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.scheduling.collectives import emit_step
from torchard.sharding.testing import contributions, layouts, meshes, shard_at, whole_of

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), min_size=0, max_size=3).map(tuple)


def test_layouts_that_nothing_leads_to() -> None:
    x, two = Sub(6, ("a",)), (Sub(2), Sub(3, ("a",)))
    sizes = (("a", 2), ("b", 2))
    with pytest.raises(ValueError, match="pending over"):
        plan(Layout(((Sub(6),),)), Layout(((Sub(6),),), (("a", "sum"),)), sizes)
    with pytest.raises(ValueError, match="a varying value is not reduced implicitly"):
        plan(Layout(((x,),), (("b", VARYING),)), Layout(((x,),)), sizes)
    with pytest.raises(ValueError, match=r"dim 0 of .* is not contiguous"):
        Layout((two,)).local_range(0, {"a": 0}, dict(sizes))


def torch_chunk(n: int, axes: tuple[str, ...], at: dict[str, int], mesh: Mesh) -> list[int]:
    part = torch.arange(n)
    for axis in axes:
        parts = part.chunk(mesh.shape[axis])
        part = parts[at[axis]] if at[axis] < len(parts) else part[:0]
    return part.tolist()


@given(st.data())
@settings(max_examples=200)
def test_chunks_are_torchs(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = tuple(data.draw(st.permutations(mesh.axes)))
    n = data.draw(st.integers(0, 20))
    for at in mesh.all_coords():
        assert list(chunk(n, axes, at, mesh.shape)) == torch_chunk(n, axes, at, mesh)


def owned(dim: tuple[Sub, ...], at: dict[str, int], mesh: Mesh) -> list[int]:
    x = torch.arange(math.prod(s.size for s in dim))
    return shard_at(x, Layout((dim,)), at, mesh).tolist()


@given(st.data())
@settings(max_examples=500)
def test_merge_and_refine_keep_ownership(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    axes = list(data.draw(st.permutations(mesh.axes)))
    subs = []
    for size in sizes:
        taken = data.draw(st.integers(0, len(axes)))
        subs.append(Sub(size, tuple(axes[:taken])))
        axes = axes[taken:]
    before = tuple(subs)
    after = merge(before, mesh.sizes)
    assert merge(after, mesh.sizes) == after
    for at in mesh.all_coords():
        assert owned(before, at, mesh) == owned(after, at, mesh)
    cut = refine(after, tuple(sizes), mesh.sizes)
    assert cut is not None, "a dim made of factors comes apart into them again"
    flat = tuple(s for dim in cut for s in dim)
    assert [math.prod(s.size for s in dim) for dim in cut] == sizes
    assert merge(flat, mesh.sizes) == after
    for at in mesh.all_coords():
        assert owned(before, at, mesh) == owned(flat, at, mesh)


@given(st.data())
@settings(max_examples=300)
def test_refine_at_any_boundary_is_right_or_refuses(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    n = data.draw(st.sampled_from([1, 2, 4, 6, 8, 12, 24]))
    (dim,) = data.draw(layouts((n,), mesh)).dims
    outer = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    cut = refine(dim, (outer, n // outer), mesh.sizes)
    if cut is not None:
        for at in mesh.all_coords():
            assert owned(dim, at, mesh) == owned((*cut[0], *cut[1]), at, mesh)


def moved(x: torch.Tensor, before: Layout, after: Layout, mesh: Mesh) -> list[torch.Tensor]:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta.update(val=x, layout=before)
    value = node
    for step in plan(before, after, mesh.sizes):
        value = emit_step(graph, value, step, node, mesh.sizes)
    assert value.meta["layout"] == after
    graph.output((value,))
    local = Lowering(graph, mesh, mesh.all_coords(), SimulatedTransport()).run()
    return compiled(local)(contributions(x, before, mesh))


@given(st.data())
@settings(max_examples=400)
def test_a_plan_moves_every_element_where_it_belongs(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(shapes)
    before = data.draw(layouts(shape, mesh, pending=True))
    after = data.draw(layouts(shape, mesh))
    kept = [p for p in before.pending if p[0] not in after.axes and data.draw(st.booleans())]
    after = Layout(after.dims, tuple(kept))
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    parts = moved(x, before, after, mesh)
    if not kept:
        want = contributions(x, after, mesh)
        for have, part in zip(parts, want, strict=True):
            assert have.shape == part.shape and torch.equal(have, part)
    assert torch.equal(whole_of(parts, after, mesh), x)


# -- how much it moves ------------------------------------------------------------------------------

A, B, R = ("a",), ("b",), ()
MESH = Mesh({"a": 2, "b": 4}, virtual=True)


def flat(*axes: tuple[str, ...], pending: str = "") -> Layout:
    dims = tuple((Sub(16, a),) for a in axes)
    return Layout(dims, tuple((p, "sum") for p in pending))


KNOWN = [
    (flat(A, R), flat(R, A), ["all_to_all a"]),
    (flat(R, R, pending="a"), flat(A, R), ["psum_scatter a"]),
    (flat(R, R, pending="a"), flat(R, R), ["all_reduce a"]),
    (flat(R, R, pending="ab"), flat(R, R), ["all_reduce ab"]),
    (flat(R, R), flat(A, B), ["slice a", "slice b"]),
    (flat(R, R), flat(A + B, R), ["slice a", "slice b"]),
    (flat(A, R), flat(R, R), ["all_gather a"]),
    (flat(A, R), flat(A + B, R), ["slice b"]),
    (flat(A + B, R), flat(A, R), ["all_gather b"]),
    (flat(A + B, R), flat(A, B), ["all_to_all b"]),
    (flat(A, B), flat(R, B), ["all_gather a"]),
    (flat(A, R, pending="b"), flat(A, B), ["psum_scatter b"]),
    (flat(R, R, pending="ab"), flat(A, B), ["psum_scatter a", "psum_scatter b"]),
    (flat(R, R, pending="ab"), flat(R, B), ["all_reduce a", "psum_scatter b"]),
    (flat(R, A), flat(A + B, R), ["all_to_all a", "slice b"]),
    (flat(A, R), flat(B, R), ["all_gather a", "slice b"]),
]


def kinds(steps: tuple[ReshardStep, ...]) -> list[str]:
    return sorted(f"{s.kind} {''.join(sorted(s.axes))}" for s in steps)


@pytest.mark.parametrize("case", range(len(KNOWN)))
def test_known_best_plans(case: int) -> None:
    before, after, want = KNOWN[case]
    assert kinds(plan(before, after, MESH.sizes)) == sorted(want)


def cheapest(before: Layout, after: Layout, mesh: Mesh) -> float:
    """The fewest elements by exhaustion: relax all single-axis moves until nothing changes.

    A move: an axis leaves the innermost place of one dim (or is pending, or idle) and enters the
    innermost place of the dim where it is wanted, or none. (Parking it on a third dim meanwhile can
    save bytes, for one more collective; plans do not.)
    """
    goal = {a: d for d, dim in enumerate(after.dims) for a in dim[0].axes}
    best: dict[Layout, float] = {before: 0.0}
    frontier = [before]
    while frontier:
        grown = []
        for layout in frontier:
            for nxt, price in _moves(layout, goal, mesh):
                total = best[layout] + price
                if total < best.get(nxt, math.inf) - 1e-9:
                    best[nxt] = total
                    grown.append(nxt)
        frontier = list(dict.fromkeys(grown))
    return best[after]


def _moves(layout: Layout, goal: dict[str, int], mesh: Mesh) -> list[tuple[Layout, float]]:
    found: list[tuple[Layout, float]] = []
    size = layout.largest_local(mesh.shape)
    axes = [dim[0].axes for dim in layout.dims]
    pending = dict(layout.pending)
    for axis, k in mesh.shape.items():
        share = (k - 1) / k
        at = next((i for i, a in enumerate(axes) if axis in a), None)
        if at is not None and axes[at][-1] != axis:
            continue
        rest = [tuple(x for x in a if x != axis) for a in axes]
        less = tuple(p for p in layout.pending if p[0] != axis)
        for to in {None, goal.get(axis)} - ({at} if at is not None else set()):
            new = [(*a, axis) if i == to else a for i, a in enumerate(rest)]
            dims = tuple((Sub(d[0].size, a),) for d, a in zip(layout.dims, new, strict=True))
            made = Layout(dims, less)
            padded = made.largest_local(mesh.shape) * k  # of what psum_scatter makes parts of one size
            if axis in pending:
                price = (2 * size if to is None else padded) * share
            elif at is None:
                price = 0.0
            else:
                price = (size * k if to is None else size) * share
            found.append((made, price))
    return found


@given(st.data())
@settings(max_examples=150)
def test_no_plan_is_cheaper(data: st.DataObject) -> None:
    """Over two axes and two dims, against exhaustive search."""
    mesh = Mesh({"a": 2, "b": data.draw(st.sampled_from([2, 3]))}, virtual=True)
    shape = data.draw(st.tuples(st.sampled_from([4, 6, 12]), st.sampled_from([3, 12])))
    ways = [w for w in itertools.product([R, A, B, A + B, B + A], repeat=2) if _valid(w)]
    first, second = data.draw(st.sampled_from(ways)), data.draw(st.sampled_from(ways))
    free = [a for a in "ab" if a not in first[0] + first[1] and data.draw(st.booleans())]
    before = Layout(
        tuple((Sub(n, w),) for n, w in zip(shape, first, strict=True)),
        tuple((a, "sum") for a in free),
    )
    after = Layout(tuple((Sub(n, w),) for n, w in zip(shape, second, strict=True)))
    best = cheapest(before, after, mesh)
    steps = plan(before, after, mesh.sizes)
    assert sum(s.elements(mesh.sizes) for s in steps) <= best + 1e-6
    assert cost(before, after, mesh.sizes) <= best + 0.1


def _valid(ways: tuple[tuple[str, ...], ...]) -> bool:
    used = ways[0] + ways[1]
    return len(used) == len(set(used))
