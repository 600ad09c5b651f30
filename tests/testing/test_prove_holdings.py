"""Who holds what: as the proof has it and as cutting a range has it, and after each step."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard.sharding import Mesh
from torchard.sharding.layouts.layout import Layout, Sub
from torchard.sharding.layouts.reshard import plan
from torchard.sharding.testing import layouts, meshes, shard_at
from torchard.testing.prove.holdings import Spread, digits_of, spread, spreads
from torchard.testing.prove.steps import check_step, same

SHAPES = [(6,), (5, 4), (12, 3), (1, 7), (2, 8, 3)]


def indices(found: Spread, at: dict[str, int], mesh: Mesh) -> list[int]:
    """What the proof says that a rank holds."""
    index = 0
    for axis in found.axes:
        index = index * mesh.shape[axis] + at[axis]
    pieces = found.held[index]
    values = [0]
    for size, start, stop in pieces:
        values = [v * size + i for v in values for i in range(start, stop)]
    return values


@given(st.data())
@settings(max_examples=examples(ci=25, explore=2000))
def test_each_rank_holds_what_its_shard_is(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    shape = data.draw(st.sampled_from(SHAPES))
    layout = data.draw(layouts(shape, mesh, pending=True))
    found = spreads(layout, mesh.sizes)
    for d, n in enumerate(shape):
        one = Layout((layout.dims[d],))
        for at in mesh.all_coords():
            assert indices(found[d], at, mesh) == shard_at(torch.arange(n), one, at, mesh).tolist()


@given(st.data())
@settings(max_examples=examples(ci=25, explore=2000))
def test_a_dim_is_all_combinations_of_its_factors(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    (n,) = data.draw(st.sampled_from([(4,), (6,), (12,), (8,)]))
    layout = data.draw(layouts((n,), mesh))
    outer = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    found = spread(digits_of(layout.dims[0], mesh.sizes), (outer, n // outer), mesh.sizes)
    for at in mesh.all_coords():
        held = shard_at(torch.arange(n), layout, at, mesh).tolist()
        sides = [
            sorted({i // (n // outer) for i in held}),
            sorted({i % (n // outer) for i in held}),
        ]
        combined = [a * (n // outer) + b for a, b in itertools.product(*sides)]
        if found is None:
            continue
        assert combined == held
        if held:
            assert [indices(factor, at, mesh) for factor in found] == sides


@given(st.data())
@settings(max_examples=examples(ci=25, explore=2000))
def test_every_step_that_is_planned_is_right_and_no_other(data: st.DataObject) -> None:
    """The planned steps pass; where one is left out, or goes elsewhere, something does not."""
    mesh = data.draw(meshes())
    shape = data.draw(st.sampled_from(SHAPES))
    before = data.draw(layouts(shape, mesh, pending=True))
    after = data.draw(layouts(shape, mesh))
    steps = plan(before, after, mesh.sizes)
    have = before
    for step in steps:
        want = step.after.normal(mesh.sizes)
        assert not check_step(step, have, want, mesh.sizes)
        other = data.draw(layouts(shape, mesh, pending=True))
        if not same(other, want, mesh.sizes):
            assert check_step(step, have, other, mesh.sizes)
        if not same(other, have, mesh.sizes):
            assert check_step(step, other, want, mesh.sizes)
        have = want
    assert same(have, after, mesh.sizes)


@pytest.mark.parametrize("seed", range(20))
def test_equal_layouts_are_told_from_others(seed: int) -> None:
    """As their shards tell them."""
    rng, mesh = Random(seed), Mesh({"a": 2, "b": 3}, virtual=True)

    def drawn() -> Layout:
        outer = rng.choice([1, 2, 3, 4, 6, 12])
        axes = rng.sample(["a", "b"], rng.randint(0, 2))
        cut = rng.randint(0, len(axes))
        return Layout(((Sub(outer, tuple(axes[:cut])), Sub(12 // outer, tuple(axes[cut:]))),))

    for _ in range(20):
        one, other = drawn(), drawn()
        alike = all(
            torch.equal(*(shard_at(torch.arange(12), layout, at, mesh) for layout in (one, other)))
            for at in mesh.all_coords()
        )
        assert same(one, other, mesh.sizes) == alike
