"""Bad input to shard: each error names the path, the spec, the shape, the mesh, and the remedy."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
import torch

import torchard as ta
from torchard import Mesh, MeshError, MeshTensor, P, PlacementError, SpecError, jit, place, shard
from torchard.functional.core.errors import DerivativeError

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
X = torch.arange(24.0).reshape(4, 6)


def says(error: BaseException, *parts: str) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is not in: {error}"


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_spec_longer_than_rank() -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda p: p["w1"] * 2, MESH, in_specs={"w1": P("tp", None, "dp")})({"w1": X})
    says(e.value, "args[0]['w1']", "P('tp', None, 'dp')", "length 3", "[4, 6]", "rank 2")
    says(e.value, "use P('tp', None)")


def test_unknown_axis() -> None:
    with pytest.raises(SpecError) as e:
        shard(double, MESH, in_specs=(P("model"),))(X)
    says(e.value, "args[0]", "P('model')", "no axis 'model'", "dp, tp", "Mesh(dp=2, tp=2")


def test_axis_twice() -> None:
    with pytest.raises(SpecError, match="uses axis 'tp' twice"):
        P("tp", "tp")
    with pytest.raises(SpecError, match="uses axis 'tp' twice"):
        P(("dp", "tp"), "tp")


@pytest.mark.parametrize("entry", [0, 1.5, ("tp", 3)])
def test_entry_of_a_wrong_type(entry: Any) -> None:
    with pytest.raises(SpecError, match="neither an axis name"):
        P(entry)


def test_spec_tree_that_does_not_fit_arguments() -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda p, x: x, MESH, in_specs=({"w": P(), "b": P()}, P()))({"w": X}, X)
    says(e.value, "in_specs", "not a prefix of args", "'b'")


def test_spec_tree_that_does_not_fit_the_result() -> None:
    with pytest.raises(SpecError) as e:
        shard(double, MESH, out_specs=(P(), P()))(X)
    says(e.value, "out_specs", "not a prefix of out")


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        (({"v": P()}, P()), "in_specs[0] is a dict with 'v', and args[0] is a dict with 'w'. Give"),
        (([P(), P()], P()), "in_specs[0] is a list of 2, and args[0] is a dict with 'w'. Give"),
        (({"w": {"a": P()}}, P()), "in_specs[0]['w'] is a dict with 'a', and args[0]['w'] is a leaf."),
        (({"w": ()}, P()), "in_specs[0]['w'] is a tuple of 0, and args[0]['w'] is a leaf. Give"),
        ((P(), P(), P()), "in_specs is a tuple of 3, and args is a tuple of 2. Give"),
    ],
)
def test_where_a_spec_tree_and_the_arguments_part(specs: Any, said: str) -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda p, x: p["w"] + x, MESH, in_specs=specs)({"w": X}, X)
    says(e.value, said, "every leaf a spec, or one spec for a whole subtree")


def test_spec_tree_that_does_not_fit_values_to_place() -> None:
    with pytest.raises(SpecError, match="specs is not a prefix of the values"):
        place({"w": X}, MESH, {"v": P()})


def test_all_misfits_are_told_at_once() -> None:
    specs = ({"a": P("tp", None, None), "b": P("model")},)
    with pytest.raises(SpecError) as e:
        shard(lambda p: p["a"], MESH, in_specs=specs)({"a": X, "b": X})
    says(e.value, "args[0]['a']", "args[0]['b']")


def test_leaf_that_is_no_spec() -> None:
    with pytest.raises(SpecError, match="leaf 'tp' of type str; use a P or None"):
        shard(double, MESH, in_specs=("tp",))(X)


def test_spec_on_a_non_tensor() -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda x, n: x * n, MESH, in_specs=(P(), P("tp")))(X, 3)
    says(e.value, "args[1]", "P('tp')", "not a tensor")


def test_spec_by_unknown_name() -> None:
    with pytest.raises(SpecError, match="in_specs names 'y', but the arguments are x"):
        shard(double, MESH, in_specs={"y": P("tp")})(x=X)


def test_factor_sizes_that_do_not_multiply() -> None:
    with pytest.raises(SpecError) as e:
        place(X, MESH, P.factors("(heads d) k", d=3, heads="tp"))
    says(e.value, "(heads d)", "do not multiply", "4")


def test_process_group_missing() -> None:
    with pytest.raises(MeshError) as e:
        Mesh({"tp": 2})
    says(e.value, "Mesh(tp=2)", "2 processes", "init_process_group", "virtual=True")


def test_argument_on_another_mesh() -> None:
    other = Mesh({"tp": 2}, virtual=True)
    x = place(X, other, P("tp"))
    with pytest.raises(MeshError) as e:
        shard(double, MESH)(x)
    says(e.value, "args[0]", "Mesh(tp=2, virtual)", "Mesh(dp=2, tp=2, virtual)", "place(")


def test_inner_shard_on_another_mesh() -> None:
    other = Mesh({"tp": 2}, virtual=True)
    inner = shard(double, other)
    with pytest.raises(MeshError, match="enclosing shard"):
        shard(lambda x: inner(x) + 1, MESH)(X)


def test_vmap_over_a_mesh_tensor() -> None:
    x = place(X, MESH, P("tp"))
    with pytest.raises(PlacementError) as e:
        torch.vmap(shard(double, MESH))(x)
    says(e.value, "vmap cannot map over a MeshTensor", "shard(vmap(f))", "Mesh(dp=2, tp=2")


def test_donated_mesh_tensor_used_again() -> None:
    x = place(X, MESH, P("tp"))
    run = jit(shard(double, MESH), backend="eager", donate_argnums=0)
    y = run(x)
    assert torch.equal(y.full(), X * 2)
    with pytest.raises(ta.DonatedError, match="donated"):
        run(x)
    with pytest.raises(ta.DonatedError, match="donated"):
        x.full()


def test_retraced_eight_times_names_the_leaf() -> None:
    run = shard(lambda x, n: x * n, MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(7):
            run(X, n)
    with pytest.warns(ta.RetraceWarning, match=re.escape("args[1]")):
        run(X, 7)


def test_argument_mutated() -> None:
    def grow(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x

    with pytest.raises(ta.PurityError) as e:
        shard(grow, MESH)(X)
    says(e.value, "args[0]", "test_errors.py", "grow")


def test_branch_on_a_value() -> None:
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(ta.PurityError) as e:
        shard(relu, MESH)(X)
    says(e.value, "test_errors.py", "torch.where")


class Undivided(torch.autograd.Function):
    """As torch.func refuses it: without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_function_that_torch_func_refuses() -> None:
    run: Any = Undivided.apply
    double = shard(lambda x: run(x).square().sum(), MESH)
    torch.testing.assert_close(torch.func.grad(double)(X), 8 * X)
    with pytest.raises(ta.PurityError) as e:
        torch.func.jvp(torch.func.grad(double), (X,), (X,))
    says(e.value, "setup_context(ctx, inputs, output)")


def test_a_derivative_that_torch_lacks() -> None:
    stops = shard(lambda x: torch.linspace(x.sum(), 1, 3), MESH)
    with pytest.raises(DerivativeError) as e:
        torch.func.grad(lambda x: stops(x).sum())(X)
    says(e.value, "linspace", "detach()")


def test_global_random_state() -> None:
    with pytest.raises(ta.PurityError) as e:
        shard(lambda x: x + torch.randn(4, 6), MESH)(X)
    says(e.value, "test_errors.py", "key")


def test_static_argument_that_is_not_hashable() -> None:
    with pytest.raises(ta.StaticArgumentError, match=re.escape("args[1]")):
        shard(lambda x, s: x, MESH)(X, bytearray(b"x"))


def test_devices_that_do_not_mix() -> None:
    run = shard(lambda x, y: (x * 2, y * 2), MESH)
    with pytest.raises(MeshError) as e:
        run.lower(X, ta.ShapeDtype((4, 6), torch.float32, "cuda"))
    says(e.value, "args[0]", "cpu", "args[1]", "cuda", ".to(")


def test_operation_without_a_rule_is_gathered_and_the_plan_says_so() -> None:
    x = place(X, MESH, P("tp"))
    count = functools.partial(torch.histc, bins=4, min=-3, max=3)
    run = shard(count, MESH, out_specs=P())
    torch.testing.assert_close(run(x), count(X))
    plan = run.lower(x).collectives
    assert [r.kind for r in plan] == ["all_gather"]
    assert "has no factor rule" in plan[0].note
    assert "has no factor rule" in str(plan)


def test_shards_of_a_wrong_shape() -> None:
    with pytest.raises(PlacementError) as e:
        MeshTensor.from_shards([torch.ones(2, 2), torch.ones(2, 2)], MESH, P("tp"), shape=(3, 2))
    says(e.value, "shard 1", "[2, 2]", "[1, 2]", "P('tp')")


def test_shards_of_a_wrong_number() -> None:
    with pytest.raises(PlacementError, match="2 distinct shards"):
        MeshTensor.from_shards([torch.ones(3, 2)], MESH, P("tp"), shape=(3, 2))


def test_from_local_on_a_virtual_mesh() -> None:
    with pytest.raises(PlacementError, match="from_shards"):
        MeshTensor.from_local(torch.ones(2, 2), MESH, P("tp"), shape=(4, 2))


def test_what_a_mesh_tensor_refuses() -> None:
    x = place(X, MESH, P("tp"))
    with pytest.raises(PlacementError, match="add_ writes in place"):
        x.add_(1)
    with pytest.raises(PlacementError, match=re.escape(".full()")):
        bool(x)


def test_constrain_longer_than_rank() -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda x: ta.constrain(x, P(None, None, "tp")), MESH)(X)
    says(e.value, "P(None, None, 'tp')", "[4, 6]", "rank 2")


def test_constrain_at_that_matches_nothing() -> None:
    with pytest.raises(SpecError) as e:
        shard(lambda x: ta.name(x * 2, "hidden"), MESH, constrain_at={"out": P("tp")})(X)
    says(e.value, "'out'", "hidden")


def test_rule_that_does_not_parse() -> None:
    from torchard.sharding.layouts.factors import RuleError, instantiate

    with pytest.raises(RuleError, match=re.escape("exactly one '->'")):
        instantiate("i j", ((2, 2),), ((2, 2),))
    with pytest.raises(RuleError) as e:
        instantiate("i k, k j -> i j", ((2, 3), (4, 5)), ((2, 5),))
    says(e.value, "i k, k j -> i j", "factor k is 3 and 4", "(2, 3)")
    with pytest.raises(RuleError, match="unknown clause 'hole'"):
        instantiate("i -> i | hole i", ((2,),), ((2,),))


def test_sparse_tensors_are_not_placed() -> None:
    with pytest.raises(PlacementError) as e:
        place({"w": X.to_sparse()}, MESH, P("tp"))
    says(e.value, "values['w']", "torch.sparse_coo", "to_dense()")


def test_a_spec_unpacks_into_another() -> None:
    spec = P("dp", None, ("tp",))
    assert P(None, *spec) == P(None, "dp", None, ("tp",)) and list(P()) == [] and P(*spec) == spec
    with pytest.raises(SpecError, match=re.escape(".led(1)")):
        P(None, *P.factors("(a b)", a=2))


def test_what_needs_process_groups() -> None:
    with pytest.raises(PlacementError, match="is on a virtual mesh; a DTensor needs process groups"):
        ta.to_dtensor(place(X, MESH, P("dp")))
    with pytest.raises(MeshError, match="is virtual and has no process groups"):
        MESH.group(["dp"])


def test_specs_as_lists_and_of_factors() -> None:
    assert P(["dp", "tp"], None) == P(("dp", "tp"), None)
    with pytest.raises(SpecError) as e:
        place(X, MESH, P.factors("(a b)", a="tp"))
    says(e.value, "values has spec", "for 1 dims, but its shape is [4, 6]", "one group for each dim")
    with pytest.raises(SpecError) as e:
        place(X, MESH, P.factors("(a b) c", a=2, d="tp"))
    says(e.value, "values has spec", "whose pattern has no factor 'd'")


def test_placed_again() -> None:
    """On its own mesh it is redistributed, in a trace constrained, on another mesh refused."""
    x, other = place(X, MESH, P("dp")), Mesh({"dp": 4, "tp": 1}, virtual=True)
    again = place({"x": x, "n": 3}, MESH, P("tp"))
    assert again["x"].spec == P("tp", None) and torch.equal(again["x"].full(), X) and again["n"] == 3
    inside = shard(lambda x: place(x * 2, MESH, P(None, "tp")), MESH)(X)
    assert inside.spec == P(None, "tp") and torch.equal(inside.full(), 2 * X)
    with pytest.raises(MeshError) as e:
        place({"x": x}, other, P("dp"))
    says(e.value, "values['x'] is on Mesh(dp=2, tp=2, virtual), not on Mesh(dp=4, tp=1", ".full()")
    assert torch.equal(place(x.full(), other, P("dp")).full(), X)


def test_what_a_value_without_dims_or_of_all_ranks_has_not() -> None:
    with pytest.raises(TypeError, match="iteration over a MeshTensor without dims"):
        iter(place(torch.tensor(1.0), MESH, P()))
    with pytest.raises(PlacementError, match=r"has all ranks in this process; use \.parts"):
        place(X, MESH, P("tp")).local  # noqa: B018


def test_a_donated_value_in_a_tree() -> None:
    x = place(X, MESH, P("tp"))
    jit(shard(double, MESH), backend="eager", donate_argnums=0)(x)
    for use in (ta.full, lambda tree: ta.tree.map(lambda v: 2 * v, tree)):
        with pytest.raises(ta.DonatedError, match="donated"):
            use({"x": x})


def test_a_plan_without_collectives() -> None:
    lowered = shard(double, MESH, in_specs=(P("dp"),)).lower(X)
    assert not lowered.collectives and str(lowered.collectives) == "none"
