"""Names of dims: one annotated model, and rules that give it the plans of the known recipes."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from seeds import whole
from transformer import HEADS, LAYERS, RECIPES, WIDTH, batch, loss, parameters

from torchard import (
    Activations,
    Colwise,
    Mesh,
    P,
    Rowwise,
    SpecError,
    constrain,
    functionalize,
    initialize,
    name,
    nn,
    parallelize,
    place,
    random,
    shard,
)

DP_TP = Mesh({"dp": 2, "tp": 2}, virtual=True)


def names() -> dict[str, Any]:
    """Of the parameters of the transformer in transformer.py."""
    d = WIDTH // HEADS
    layer = {
        **dict.fromkeys(["norm1", "norm1_bias", "norm2", "norm2_bias"], P("embed")),
        "qkv": P.factors("(three h d) e", three=3, d=d, h="heads", e="embed"),
        "qkv_bias": P.factors("(three h d)", three=3, d=d, h="heads"),
        "proj": P.factors("o (h d)", d=d, h="heads", o="embed"),
        **{"up": P("mlp", "embed"), "up_bias": P("mlp")},
        **{"down": P("embed", "mlp"), "proj_bias": P("embed"), "down_bias": P("embed")},
    }
    norms = {"norm": P("embed"), "norm_bias": P("embed")}
    return {"embedding": P("vocab", "embed"), **norms, "layers": [layer] * LAYERS}


TENSOR: dict[str, Any] = {"heads": "tp", "mlp": "tp", "vocab": "tp"}
EVERYTHING: dict[str, Any] = {"heads": "dp", "mlp": "dp", "vocab": "dp", "embed": "dp"}
RULES: dict[str, dict[str, Any]] = {
    "tp=2": {**TENSOR, "batch": None, "seq": None, "embed": None},
    "tp=2 sequence": {**TENSOR, "batch": None, "seq": "tp", "embed": None},
    "fsdp=4": {**EVERYTHING, "batch": ("dp",), "seq": None},
    "fsdp=2 tp=2": {**TENSOR, "batch": "dp", "seq": None, "embed": "dp"},
}


def keep(x: torch.Tensor) -> torch.Tensor:
    return constrain(x, P("batch", "seq", "embed"))


STEP = torch.func.grad_and_value(functools.partial(loss, keep))


def crossed(program: Any) -> Counter[Any]:
    return Counter(
        (c.phase, c.kind, torch.Size(c.shape).numel(), c.axes) for c in program.collectives
    )


@pytest.mark.parametrize("plan", RULES)
def test_one_model_runs_under_every_plan(plan: str) -> None:
    """The collectives are those of the recipe's explicit specs, the values one device's."""
    recipe, rules = RECIPES[plan], RULES[plan]
    mesh = Mesh(recipe.mesh, virtual=True)
    explicit = place(parameters(), mesh, recipe.specs)
    data = [place(t, mesh, recipe.batch) for t in batch()]
    known = shard(recipe.step, mesh, out_specs=(recipe.specs, P())).lower(explicit, *data)

    params = place(parameters(), mesh, names(), rules=rules)
    data = [place(t, mesh, P("batch"), rules=rules) for t in batch()]
    run = shard(STEP, mesh, out_specs=(names(), P()), rules=rules)
    assert crossed(run.lower(params, *data)) == crossed(known)
    (have, value), (want, one) = run(params, *data), STEP(parameters(), *batch())
    torch.testing.assert_close(whole(value), one, rtol=1e-12, atol=1e-13)
    for a, b in zip(have["layers"], want["layers"], strict=True):
        for path in b:
            torch.testing.assert_close(whole(a[path]), b[path], rtol=1e-12, atol=1e-13)


def spec_under(rules: Any, spec: P, *shape: int) -> P:
    return place(torch.zeros(shape), DP_TP, spec, rules=rules).spec


@pytest.mark.parametrize(
    ("rules", "spec", "want"),
    [
        ({"a": "dp", "b": "tp"}, P("a", "b"), P("dp", "tp")),
        ({"a": ("dp", "tp"), "b": None}, P("a", "b"), P(("dp", "tp"), None)),
        ({"a": "dp", "b": "tp"}, P(("b", "a"), None), P(("tp", "dp"), None)),
        # The leftmost gets the axis, whatever the order of the rules.
        ({"a": "dp", "b": "dp"}, P("a", "b"), P("dp", None)),
        ({"a": "dp", "b": "dp"}, P("b", "a"), P("dp", None)),
        ({"a": "tp", "b": ("dp", "tp")}, P("a", "b"), P("tp", "dp")),
        # What a spec says of the mesh itself goes before its names.
        ({"a": "tp"}, P("a", "tp"), P(None, "tp")),
        ({"a": "tp", "dp": "dp"}, P("dp", "a"), P("dp", "tp")),
        ({}, P("dp"), P("dp", None)),
    ],
    ids=str,
)
def test_rules(rules: Any, spec: P, want: P) -> None:
    assert spec_under(rules, spec, 4, 8) == want


def test_names_of_factors() -> None:
    """Their place in the pattern counts, not the order in which they were given."""
    fused = P.factors("(z y) x", y="a", z=(2, "b"), x="c")
    rules = {"a": "tp", "b": None, "c": "tp"}
    want = place(torch.zeros(8, 4), DP_TP, P.factors("(z y) x", z=2, y="tp"))
    assert spec_under(rules, fused, 8, 4) == want.spec


def mlp(p: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = constrain(nn.gelu(nn.linear(x, p["up"])), P("batch", "mlp"))
    return nn.linear(hidden, p["down"])


MLP = {"up": P("mlp", "embed"), "down": P("embed", "mlp")}
MLP_RULES = {"batch": "dp", "mlp": "tp", "embed": None}


def mlp_parameters() -> dict[str, torch.Tensor]:
    return {
        "up": torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6),
        "down": torch.linspace(1, 2, 48, dtype=torch.float64).reshape(6, 8),
    }


X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)


def test_outside_any_shard_constrain_is_the_identity() -> None:
    p = mlp_parameters()
    assert torch.equal(mlp(p, X), nn.linear(nn.gelu(nn.linear(X, p["up"])), p["down"]))


def test_every_entrance_takes_rules() -> None:
    """in_specs, out_specs, constrain_at, and parameters made on the mesh."""
    key = random.key(0)
    shapes = {k: v.to("meta") for k, v in mlp_parameters().items()}
    params = initialize(
        lambda name, key, shape, dtype: nn.init_normal(key, shape, dtype=dtype),
        *(shapes, DP_TP, MLP, key),
        rules=MLP_RULES,
    )
    assert params["up"].spec == P("tp", None) and params["down"].spec == P(None, "tp")
    whole_params = {k: v.full() for k, v in params.items()}
    run = shard(mlp, DP_TP, (MLP, P("batch")), P("batch", "embed"), rules=MLP_RULES)
    out = run(whole_params, X)
    assert out.spec == P("dp", None)
    torch.testing.assert_close(out.full(), mlp(whole_params, X))
    assert [(c.kind, c.axes) for c in run.lower(whole_params, X).collectives] == [
        ("all_reduce", ("tp",))
    ]


def test_under_vmap_and_from_outside() -> None:
    p = mlp_parameters()
    run = shard(mlp, DP_TP, (MLP, None), rules=MLP_RULES)
    many = torch.stack([X, 2 * X])
    have = torch.vmap(run, (None, 0))(p, many)
    torch.testing.assert_close(whole(have), torch.vmap(mlp, (None, 0))(p, many))
    run = shard(mlp, DP_TP, (MLP, None), P(), rules=MLP_RULES)
    have = torch.func.grad(lambda p: run(p, X).square().sum())(p)
    want = torch.func.grad(lambda p: mlp(p, X).square().sum())(p)
    for k in p:
        torch.testing.assert_close(have[k], want[k])


def test_an_inner_shard_keeps_its_own_rules() -> None:
    """And what it has none for is the outer one's."""
    p, seen = mlp_parameters(), {}
    other = {"batch": None, "mlp": ("dp", "tp"), "embed": None}
    for inner in (None, MLP_RULES, other):
        run = shard(mlp, DP_TP, rules=inner)
        outer = shard(lambda p, x, run=run: run(p, x), DP_TP, out_specs=P(), rules=other)
        torch.testing.assert_close(outer(p, X), mlp(p, X))
        seen[str(inner)] = crossed(outer.lower(p, X))
    assert seen[str(None)] == seen[str(other)] != seen[str(MLP_RULES)]


def test_named_values_are_pinned_by_names() -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.linear(name(nn.gelu(nn.linear(x, p["up"])), "hidden"), p["down"])

    p, pins = mlp_parameters(), {"hidden": P("batch", "mlp")}
    run = shard(f, DP_TP, out_specs=P(), constrain_at=pins, rules=MLP_RULES)
    by_hand = shard(f, DP_TP, out_specs=P(), constrain_at={"hidden": P("dp", "tp")})
    free = shard(f, DP_TP, out_specs=P())
    torch.testing.assert_close(run(p, X), f(p, X))
    assert crossed(run.lower(p, X)) == crossed(by_hand.lower(p, X)) != crossed(free.lower(p, X))
    inside = shard(lambda p, x: run(p, x), DP_TP, out_specs=P())
    assert crossed(inside.lower(p, X)) == crossed(run.lower(p, X))


def test_styles_take_names() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6))
    fn, _ = functionalize(module)
    plan = {"0": Colwise(output_layouts=P("batch", "mlp")), "2": Rowwise()}
    specs, pins = parallelize(fn, DP_TP, plan, rules=MLP_RULES)
    assert pins == {"0/out": P("dp", "tp")} and specs["0.weight"] == P("tp", None)
    _, pins = parallelize(
        fn, DP_TP, {"0": Activations(output_layouts=1)}, batch="batch", rules=MLP_RULES
    )
    assert pins == {"0/out": P("dp", "tp")}
    specs, _ = parallelize(fn, DP_TP, {}, fsdp="batch", rules=MLP_RULES)
    assert set(specs.values()) == {P("dp", None), P("dp")}


# -- what is wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            {"mlp": "tp"},
            ["specs['up'] has spec P('mlp', 'embed')", "'embed' is neither in rules (mlp)"],
        ),
        ({}, ["'mlp' is neither in rules (which are empty) nor an axis of Mesh", "'mlp': None"]),
        ({"mlp": "x"}, ["rules['mlp'] is 'x', but", "has no axis 'x'; its axes are dp, tp."]),
        ({"mlp": 1}, ["rules['mlp'] is 1; a name maps to an axis, a tuple of axes, or None."]),
        ({"mlp": ("tp", "tp")}, ["names an axis twice"]),
        ({"tp": "dp"}, ["'tp' is an axis of Mesh", "give the dim a different name"]),
        ([("mlp", "tp")], ["rules is a list; use a mapping"]),
        ({"mlp": "x", "embed": "y"}, ["rules['mlp']", "rules['embed']"]),
        ({"other": None}, ["specs['up']", "specs['down']"]),
    ],
    ids=str,
)
def test_wrong_rules(rules: Any, says: list[str]) -> None:
    with pytest.raises(SpecError) as e:
        place(mlp_parameters(), DP_TP, MLP, rules=rules)
    for part in says:
        assert part in str(e.value), f"{part!r} is not in: {e.value}"


def test_names_without_rules() -> None:
    with pytest.raises(SpecError, match=r"no axis 'mlp'; its axes are dp, tp\. To name dims .* rules="):
        place(mlp_parameters(), DP_TP, MLP)
    with pytest.raises(SpecError, match=r"constrain at .*test_names.* no axis 'batch'.* rules="):
        shard(mlp, DP_TP)(mlp_parameters(), X)


def test_a_constraint_that_the_rules_do_not_know() -> None:
    with pytest.raises(
        SpecError, match=r"constrain at .*test_names.* 'mlp' is neither in rules \(batch\)"
    ):
        shard(mlp, DP_TP, rules={"batch": "dp"})(mlp_parameters(), X)


def test_a_name_stands_once() -> None:
    with pytest.raises(SpecError, match="'embed' twice"):
        P("embed", "embed")
