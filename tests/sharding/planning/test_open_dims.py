"""Constraints that leave dims open: `P.UNCONSTRAINED`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, jvp

from torchard import (
    Machine,
    Mesh,
    MeshTensor,
    P,
    ShapeDtype,
    constrain,
    jit,
    machines,
    name,
    repeat,
    shard,
    shard_map,
    tree,
)
from torchard.testing import prove

ONE, TWO = Mesh({"tp": 4}, virtual=True), Mesh({"dp": 2, "tp": 2}, virtual=True)
OPEN = P.UNCONSTRAINED
PLANS: Any = pytest.mark.parametrize("machine", [None, machines.h100()], ids=["rules", "machine"])
SPECS = (P("tp", OPEN), P(OPEN, "tp"), P(OPEN, None), P(OPEN), P(None, OPEN), P(OPEN, OPEN))
MADE = torch.Generator().manual_seed(0)
X, W = (torch.randn(8, 8, dtype=torch.float64, generator=MADE) for _ in range(2))
LAYERS = torch.randn(3, 8, 8, dtype=torch.float64, generator=MADE)


def same(got: Any, want: Any) -> None:
    whole = [x.full() if isinstance(x, MeshTensor) else x for x in tree.leaves(got)]
    torch.testing.assert_close(whole, tree.leaves(want))


def sent(run: Any, *args: Tensor) -> list[tuple[str, tuple[str, ...], int]]:
    return [(c.kind, c.axes, c.bytes * c.times) for c in run.lower(*args).collectives]


# -- values ---------------------------------------------------------------------------------------


def at(spec: P) -> dict[str, Callable[..., Any]]:
    """Functions of X and W with a value that has a spec."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return constrain(torch.tanh(x @ w), spec).cumsum(1)

    def layer(w: Tensor, x: Tensor) -> Tensor:
        return constrain(torch.tanh(x @ w), spec)

    return {
        "value": f,
        "gradient": grad_and_value(lambda x, w: f(x, w).square().mean(), (0, 1)),
        "jvp": lambda x, w: jvp(f, (x, w), (w, x)),
        "vmap": torch.vmap(lambda x, w: f(x[None] * w, w[:, None] * x)),
        "loop": lambda x, w: repeat(layer, LAYERS * w, x),
        "gradient of loop": grad_and_value(lambda x, w: repeat(layer, LAYERS * w, x).sum(), 1),
        "uneven": lambda x, w: f(x[:5, :7], w[:7, :3]),
        "narrow": lambda x, w: f(x[:1], w[:, :3]),
    }


@PLANS
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_they_are_the_identity(spec: P, mesh: Mesh, machine: Machine | None) -> None:
    for f in at(spec).values():
        want = f(X, W)
        for specs in ((P("tp"), P()), (P(None, "tp"), P("tp")), (P(mesh.axes), P(None, mesh.axes))):
            same(shard(f, mesh, specs, machine=machine)(X, W), want)


@PLANS
def test_they_hold_in_other_transforms(machine: Machine | None) -> None:
    f = at(P("dp", OPEN))["value"]
    run = shard(f, TWO, (P("dp"), P(None, "tp")), machine=machine)
    same(jit(run, backend="eager")(X, W), f(X, W))
    same(torch.vmap(run)(LAYERS, LAYERS), torch.vmap(f)(LAYERS, LAYERS))
    prove(run.lower(X, W))


def test_axes_that_are_not_manual_may_split_open_dims() -> None:
    def local(x: Tensor) -> Tensor:
        return constrain(x * 2, P("tp", OPEN)).sin()

    run = shard_map(local, TWO, (P("dp"),), P("dp"), axis_names={"dp"})
    same(shard(run, TWO)(X), (X * 2).sin())


# -- layouts --------------------------------------------------------------------------------------


@PLANS
def test_what_is_fixed_and_what_is_open(machine: Machine | None) -> None:
    split = {
        P("dp", OPEN): P("dp", "tp"),
        P(OPEN, "tp"): P("dp", "tp"),
        P(OPEN, None): P("dp", None),
        P(OPEN): P("dp", None),
        P(None, OPEN): P(None, "tp"),
        P(("dp", "tp"), OPEN): P(("dp", "tp"), None),  # no axis is left
    }
    for spec, want in split.items():
        run = shard(lambda x, s=spec: constrain(x, s), TWO, (P("dp", "tp"),), machine=machine)
        assert run(X).spec == want


def test_names_of_dims() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return name(x @ w, "hidden")

    for axis, want in (("dp", P("dp", "tp")), (None, P(None, "tp"))):
        specs: Any = {"in_specs": (P("dp"), P(None, "tp")), "rules": {"batch": axis}}
        run = shard(f, TWO, constrain_at={"hidden": P("batch", OPEN)}, **specs)
        assert run(X, W).spec == want
        inner = shard(lambda x, w: constrain(x @ w, P("batch", OPEN)), TWO, rules={"batch": axis})
        assert shard(inner, TWO, (P("dp"), P(None, "tp")))(X, W).spec == want


def test_what_a_constraint_splits_is_split_before_it() -> None:
    """Nothing else is split: the product is computed in parts, and its other dim stays whole."""
    run = shard(lambda x, w: constrain(x @ w, P("tp", OPEN)), ONE)
    assert run(X, W).spec == P("tp", None)
    lowered = run.lower(X, W)
    assert [axis.flops for axis in lowered.work.axes] == [1.0]
    assert "nothing that is given is split" not in str(lowered.plan)


def in_part_manual(fn: Callable[..., Any], *args: Any) -> Any:
    """A program whose rows are split over dp by hand, so that its plan is that of rules."""
    specs = P("dp"), *[P()] * (len(args) - 1)
    return shard_map(fn, TWO, specs, P("dp"), axis_names={"dp"}).lower(*args)


def test_rules_carry_what_is_fixed_back_to_a_product() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        for _ in range(6):
            y = torch.relu(y)
        return constrain(y, P("tp", OPEN))

    lowered = in_part_manual(f, ShapeDtype((64, 8)), ShapeDtype((8, 8)))
    assert not lowered.collectives and {axis.flops for axis in lowered.work.axes} == {1.0}


def test_rules_split_an_open_dim_as_readers_want_it() -> None:
    """A rank of tp has 32 × 4 elements, of which it sends half; gathered, it would send all."""

    def f(x: Tensor) -> Tensor:
        columns = constrain(x, P(None, "tp"))
        return constrain(constrain(columns, P(OPEN, None)).cos().sin(), P("tp"))

    (moved,) = in_part_manual(f, ShapeDtype((64, 8))).collectives
    assert (moved.kind, moved.axes, moved.bytes) == ("all_to_all", ("tp",), 32 * 4 * 4 / 2)


@pytest.mark.parametrize("width", [8, 512])
def test_lost_axes_are_restored_on_open_dims(width: int) -> None:
    """What a sort needs whole is moved to the dim that the product keeps, as without a constraint."""

    def before(x: Tensor, w: Tensor) -> Tensor:
        return constrain(x, P(OPEN, None)).sort(1).values @ w

    def after(x: Tensor, w: Tensor) -> Tensor:
        return constrain(torch.relu(x.sort(1).values), P(OPEN, None)) @ w

    for f in (before, after):
        lowered = shard(f, ONE, (P(None, "tp"), P())).lower(*[ShapeDtype((width, width))] * 2)
        assert [c.kind for c in lowered.collectives] == ["all_to_all"]
        assert [axis.flops for axis in lowered.work.axes] == [1.0]


# -- collectives ----------------------------------------------------------------------------------


@PLANS
def test_an_open_dim_takes_the_axes_of_others(machine: Machine | None) -> None:
    """Each rank sends 3/4 of its 8 × 2 shard; with both dims fixed, it would send its shard to three."""
    specs: Any = {"in_specs": (P(None, "tp"),), "machine": machine}
    rows = shard(lambda x: constrain(x, P(OPEN, None)).cumsum(1), ONE, out_specs=P("tp"), **specs)
    assert sent(rows, X) == [("all_to_all", ("tp",), 3 * 4 * 8)]
    whole = shard(lambda x: constrain(x, P(None, None)).cumsum(1), ONE, out_specs=P("tp"), **specs)
    assert sent(whole, X) == [("all_gather", ("tp",), 3 * 16 * 8)]


@PLANS
def test_a_sum_is_scattered_along_an_open_dim(machine: Machine | None) -> None:
    """Of sums of 4 × 8 terms each rank sends half; fixed, they are added up everywhere."""
    specs: Any = {"in_specs": (P("dp", "tp"), P("tp")), "out_specs": P("dp", "tp"), "machine": machine}
    scattered = shard(lambda x, w: constrain(x @ w, P("dp", OPEN)), TWO, **specs)
    assert sent(scattered, X, W) == [("psum_scatter", ("tp",), 16 * 8)]
    fixed = shard(lambda x, w: constrain(x @ w, P("dp")), TWO, **specs)
    assert sum(size for *_, size in sent(fixed, X, W)) > 16 * 8


def test_the_cotangent_is_constrained_too() -> None:
    """Rows are moved to columns, and the cotangent's columns to rows."""

    def kinds(spec: P) -> list[str]:
        def f(x: Tensor) -> Tensor:
            return constrain(constrain(x, spec), P(None, "tp")).sin().sum()

        return [c.kind for c in shard(torch.func.grad(f), ONE, (P("tp"),)).lower(X).collectives]

    assert kinds(P("tp", OPEN)) == kinds(P("tp")) == ["all_to_all"] * 2


def test_a_collective_of_a_constraint_has_a_reason() -> None:
    """Without it, the shards are gathered: each rank sends its 64 × 16 elements to three others."""

    def f(x: Tensor) -> Tensor:
        return name(constrain(x, P(OPEN, None)), "rows").cumsum(1)

    run = shard(f, ONE, (P(None, "tp"),), P("tp"), machine=machines.h100())
    lowered = run.lower(ShapeDtype((64, 64)))
    (value,), (moved,) = lowered.plan.why("rows"), lowered.collectives
    assert value.spec == P("tp", None) and moved.kind == "all_to_all"
    assert f"+{3 * 64 * 16 * 4 * 3 // 4:,} bytes per rank" in str(lowered.plan.why(moved))
