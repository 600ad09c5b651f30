"""What goes into shard and what comes out: plain and placed, pinned and propagated."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded_programs import equal_when_sharded

from torchard import (
    Mesh,
    MeshTensor,
    P,
    ShapeDtype,
    clip_by_global_norm,
    constrain,
    full,
    global_norm,
    jit,
    name,
    nn,
    optim,
    place,
    random,
    redistribute,
    scope,
    shard,
)
from torchard.functional.programs.tags import LAYOUT
from torchard.sharding.planning.propagation.plan import choose
from torchard.sharding.scheduling import improved

MESH = Mesh({"dp": 2, "tp": 3}, virtual=True)
X = random.normal(random.key(0), (8, 6), dtype=torch.float64)
W = random.normal(random.key(1), (7, 6), dtype=torch.float64)


def kinds(program: Any) -> list[str]:
    return [r.kind for r in program.collectives]


# -- in and out ---------------------------------------------------------------------------------


def test_a_plain_input_gives_a_plain_gradient() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, W).square().sum()

    got = torch.func.grad(shard(f, MESH, in_specs=(P("dp"),)))(X)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, torch.func.grad(f)(X))


def test_a_placed_input_gives_a_gradient_in_its_spec() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, W).square().sum()

    got = torch.func.grad(shard(f, MESH))(place(X, MESH, P("dp", "tp")))
    assert isinstance(got, MeshTensor) and got.spec == P("dp", "tp")
    torch.testing.assert_close(got.full(), torch.func.grad(f)(X))


def test_in_specs_split_the_work_of_a_plain_input() -> None:
    program = shard(lambda x: F.linear(x, W), MESH, in_specs=P("dp")).lower(X)
    (product,) = [n for n in program.calls if n.target is torch.ops.aten.mm.default]
    assert product.meta["layout"].split_axes == ("dp",)
    assert kinds(program) == []


def test_what_comes_out_plain() -> None:
    def f(x: torch.Tensor) -> dict[str, Any]:
        return {"rank 0": x.sum(), "asked": x * 2, "found": x * 3, "static": "text", "none": None}

    out = shard(f, MESH, in_specs=P("dp"), out_specs={
        "rank 0": None, "asked": P(), "found": None, "static": None, "none": None
    })(X)
    assert type(out["rank 0"]) is torch.Tensor and type(out["asked"]) is torch.Tensor
    assert isinstance(out["found"], MeshTensor) and out["found"].spec == P("dp", None)
    assert out["static"] == "text" and out["none"] is None


def test_an_update_keeps_the_spec_of_what_it_updates() -> None:
    w = place(W, MESH, P("tp"))
    out = shard(lambda w, x: w - 0.1 * (x.T @ x).sum() * w, MESH)(w, X)
    assert out.spec == P("tp", None)


def test_a_matmul_result_does_not_take_the_spec_of_a_like_shaped_input() -> None:
    a = place(X[:6], MESH, P("tp"))
    out = shard(lambda a, b: b @ a, MESH)(a, X[:6])
    assert out.spec == P(None, None)


def test_arguments_by_keyword_and_specs_by_name() -> None:
    def f(x: torch.Tensor, *, scale: float, shift: torch.Tensor) -> torch.Tensor:
        return x * scale + shift

    run = shard(f, MESH, in_specs={"x": P("dp"), "shift": P(None, "tp")})
    out = run(X, scale=2.0, shift=X + 1)
    torch.testing.assert_close(out.full(), f(X, scale=2.0, shift=X + 1))
    assert set(out.spec.axes) == {"dp", "tp"}


def test_a_changing_float_is_not_traced_again() -> None:
    traces = []

    def f(x: torch.Tensor, rate: float) -> torch.Tensor:
        traces.append(rate)
        return x * rate

    run = shard(f, MESH)
    for rate in (0.1, 0.2, 0.3):
        torch.testing.assert_close(run(X, rate).full(), X * rate)
    assert len(traces) == 1


def test_outputs_that_are_inputs_or_twice_the_same() -> None:
    x = place(X, MESH, P("dp"))
    a, b, c = shard(lambda x: (x, x * 2, x), MESH)(x)
    for value, want in ((a, X), (b, X * 2), (c, X)):
        assert torch.equal(value.full(), want)


def test_lower_takes_shapes_alone() -> None:
    shape = ShapeDtype((8, 6), torch.float64)
    program = shard(lambda x: F.linear(x, W), MESH, in_specs=P(None, "tp")).lower(shape)
    assert kinds(program) == ["all_reduce"]


def test_a_mesh_of_one_sends_nothing() -> None:
    one = Mesh({"tp": 1}, virtual=True)
    w = place(W, one, P("tp"))
    run = shard(lambda w, x: F.linear(x, w).sum(), one)
    assert kinds(run.lower_joint(w, X)) == []
    assert kinds(run.lower(w, X)) == []


# -- pins ---------------------------------------------------------------------------------------


def test_constrain_pins_from_inside() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return constrain(x * 2, P(None, "tp")) + 1

    out = shard(f, MESH)(place(X, MESH, P("dp")))
    assert out.spec == P(None, "tp")
    torch.testing.assert_close(out.full(), X * 2 + 1)
    assert torch.equal(f(X), X * 2 + 1), "outside shard it is the identity"


def test_constrain_at_pins_from_outside() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            with scope(f"block/{i}"):
                x = name(x * 2, "out")
        return x

    run = shard(f, MESH, constrain_at={"block/1/*": P("tp"), "block/0/out": P(None, "dp")})
    out = run(X)
    torch.testing.assert_close(out.full(), X * 4)
    assert out.spec == P("tp", None)
    by_name = shard(f, MESH, constrain_at={"out": P("tp")})(X)
    assert by_name.spec == P("tp", None)


@pytest.mark.parametrize("derive", [lambda f: f, torch.func.grad], ids=["value", "gradient"])
@pytest.mark.parametrize(
    "outer", [partial(jit, backend="eager"), lambda f: shard(f, MESH)], ids=["jit", "shard"]
)
def test_constrain_at_holds_inside_another_trace(outer: Any, derive: Any) -> None:
    """The pin moves what would have stayed where it is."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return name(x * 2, "hidden").square().sum()

    pinned = shard(f, MESH, constrain_at={"hidden": P(None, "tp")})
    x = place(X, MESH, P("tp"))
    for inner, moves in ((pinned, True), (shard(f, MESH), False)):
        run = outer(lambda x, inner=inner: derive(inner)(x) * 3)
        assert ("all_to_all" in kinds(run.lower(x))) == moves
        have = run(x)
        want = derive(f)(X) * 3
        torch.testing.assert_close(have if derive(f)(X).ndim == 0 else have.full(), want)


def test_the_cotangent_is_pinned_alike() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return constrain(x * 2, P("dp")).square().sum()

    program = shard(f, MESH).lower_joint(X)
    backward = [n for n in program.calls if n.meta.get("phase") == "backward"]
    assert any("dp" in n.meta["layout"].split_axes for n in backward if "layout" in n.meta)
    torch.testing.assert_close(torch.func.grad(shard(f, MESH))(X), 8 * X)


# -- dims that keep their factors ---------------------------------------------------------------


def test_flattening_a_split_dim_moves_nothing() -> None:
    x = place(torch.arange(240.0).reshape(4, 6, 10), MESH, P("dp", "tp"))

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(24, 10) * 2).reshape(4, 6, 10)

    run = shard(f, MESH)
    assert kinds(run.lower(x)) == []
    assert run(x).spec == P("dp", "tp", None)
    assert torch.equal(run(x).full(), x.full() * 2)


def test_fused_heads_are_split_inside_their_dim() -> None:
    three, heads, d, e = 3, 6, 4, 8
    w = random.normal(random.key(2), (three * heads * d, e), dtype=torch.float64)
    x = random.normal(random.key(3), (5, e), dtype=torch.float64)
    spec = P.factors("(three heads d) e", three=3, d=d, heads="tp")
    placed = place(w, MESH, spec)
    assert [p.shape[0] for p in placed.parts] == [three * 2 * d] * 3
    assert torch.equal(placed.full(), w)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, w).reshape(5, three, heads, d).unbind(1)
        return q * k + v

    run = shard(f, MESH)
    assert kinds(run.lower(placed, x)) == []
    out = run(placed, x)
    assert out.spec == P(None, "tp", None)
    torch.testing.assert_close(out.full(), f(w, x))


def test_fused_projections_come_apart_by_chunk_without_a_gather() -> None:
    w = random.normal(random.key(2), (2 * 9, 8), dtype=torch.float64)
    x = random.normal(random.key(3), (5, 8), dtype=torch.float64)
    placed = place(w, MESH, P.factors("(two f) e", two=2, f="tp"))

    def swiglu(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    run = shard(swiglu, MESH)
    assert run(placed, x).spec == P(None, "tp")
    torch.testing.assert_close(run(placed, x).full(), swiglu(w, x))
    assert kinds(run.lower(placed, x)) == []
    assert kinds(run.lower_joint(placed, x, argnums=0)) == []
    joined = shard(lambda w: torch.cat(torch.split(w, 9)), MESH)
    assert kinds(joined.lower(placed)) == []
    assert torch.equal(joined(placed).full(), w)


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        (P("tp"), P(None, "tp"), ["all_to_all"]),
        (P("tp"), P(), ["all_gather"]),
        (P(), P("dp", "tp"), []),
        (P("dp"), P("dp", "tp"), []),
        (P(("dp", "tp")), P("dp"), ["all_gather"]),
        (P("dp", "tp"), P("tp", "dp"), None),
    ],
)
def test_redistribute(before: P, after: P, want: list[str] | None) -> None:
    x = torch.arange(35.0).reshape(5, 7)
    moved = redistribute(place(x, MESH, before), after)
    assert torch.equal(moved.full(), x)
    assert set(moved.spec.axes) == set(after.axes)
    program = shard(lambda x: x, MESH, out_specs=after).lower(place(x, MESH, before))
    if want is not None:
        assert kinds(program) == want


def test_shards_that_are_empty() -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.linear(x, w), -1).amax(-1) + w.amax() + F.layer_norm(w, (6,)).sum()

    equal_when_sharded(f, (W[:2], X), MESH, (P("tp"), P("dp")), None)


# -- training -----------------------------------------------------------------------------------


def test_a_step_with_embedding_dropout_and_cross_entropy() -> None:
    """Everything a language model's step needs, split over both axes, against one device."""
    keys = random.split(random.key(4), 3)
    params = {
        "table": nn.init_normal(keys[0], (11, 6), dtype=torch.float64),
        "up": nn.init_normal(keys[1], (9, 6), dtype=torch.float64, std=0.5),
        "down": nn.init_normal(keys[2], (11, 9), dtype=torch.float64, std=0.5),
    }
    ids = torch.arange(24).reshape(4, 6) % 11
    init, update = optim.adamw(0.1)

    def step(params: Any, state: Any, ids: torch.Tensor, key: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            h = nn.embedding(params["table"], ids)
            h = nn.dropout(key, nn.gelu(nn.linear(h, params["up"])), 0.25)
            return nn.cross_entropy(nn.linear(h, params["down"])[:, :-1], ids[:, 1:])

        grads, value = torch.func.grad_and_value(loss)(params)
        grads, norm = clip_by_global_norm(grads, 1.0)
        params, state = update(grads, state, params)
        return params, state, value, norm

    specs = {"table": P("tp"), "up": P("tp"), "down": P("tp")}
    placed, batch = place(params, MESH, specs), place(ids, MESH, P("dp"))
    state, placed_state = init(params), init(placed)
    run = shard(step, MESH)
    for i in range(3):
        key = random.fold_in(random.key(5), i)
        params, state, value, norm = step(params, state, ids, key)
        placed, placed_state, got, got_norm = run(placed, placed_state, batch, key)
        torch.testing.assert_close(got, value, rtol=1e-12, atol=0)
        torch.testing.assert_close(got_norm, norm, rtol=1e-12, atol=0)
    for k, v in params.items():
        assert placed[k].spec.axes == ("tp",)
        torch.testing.assert_close(placed[k].full(), v, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [P(), P("tp")])
def test_a_placed_value_is_a_copy(spec: P) -> None:
    x = torch.zeros(4)
    held = place(x, Mesh({"tp": 2}, virtual=True), spec)
    x += 1
    assert torch.equal(held.full(), torch.zeros(4))


@pytest.mark.parametrize("placed", [False, True])
def test_what_is_below_the_limit_is_not_scaled(placed: bool) -> None:
    values: Any = [torch.ones(4), torch.full((2, 2), -2.0)]
    given = place(values, Mesh({"tp": 2}, virtual=True), P("tp")) if placed else values
    clipped, norm = clip_by_global_norm(given, 100.0)
    assert float(norm) == pytest.approx(20**0.5)
    for have, want in zip(clipped, values, strict=True):
        assert torch.equal(have.full() if placed else have, want)


def test_norms_of_placed_trees() -> None:
    tree = {"a": place(X, MESH, P("dp", "tp")), "b": [place(W, MESH, P()), X]}
    want = (2 * X.square().sum() + W.square().sum()).sqrt()
    torch.testing.assert_close(global_norm(tree), want)
    clipped, norm = clip_by_global_norm(tree, 0.5)
    torch.testing.assert_close(norm, want)
    torch.testing.assert_close(global_norm(clipped), torch.tensor(0.5, dtype=torch.float64))
    assert clipped["a"].spec == P("dp", "tp")


@pytest.mark.parametrize("ids", [[7], [0, 6], [-8], [3, -1]], ids=str)
@pytest.mark.parametrize("how", ["embedding", "index", "index_select", "gather"])
def test_ids_outside_a_split_table_are_refused_as_outside_a_whole_one(
    how: str, ids: list[int]
) -> None:
    lookups = {
        "embedding": lambda t, i: F.embedding(i, t),
        "index": lambda t, i: t[i],
        "index_select": lambda t, i: t.index_select(0, i),
        "gather": lambda t, i: t.gather(0, i[:, None].expand(-1, 6)),
    }
    lookup, index = lookups[how], torch.tensor(ids)
    table = place(W[:6], Mesh({"tp": 4}, virtual=True), P("tp"))  # the last shard is empty
    run = shard(lookup, table.mesh)
    try:
        want = lookup(W[:6], index)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            run(table, index)
    else:
        assert torch.equal(run(table, index).full(), want)


def test_a_mean_square_error_over_rows_sends_scalars() -> None:
    x, y = place(X, MESH, P("dp")), place(X + 1, MESH, P("dp"))
    program = shard(F.mse_loss, MESH).lower_joint(x, y)
    assert [(r.kind, r.shape) for r in program.collectives] == [("all_reduce", ())]


def test_what_moves_data_does_not_keep_statistics_from_coming_apart() -> None:
    x, y = (place(X, MESH, P(None, "tp")) for _ in range(2))
    run = shard(lambda x, y: (F.layer_norm(x, (6,)), y[:, 1:] - y[:, :-1]), MESH)
    crossed = kinds(run.lower(x, y))
    assert crossed.count("all_reduce") == 2 and "all_gather" not in crossed


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp")], ids=str)
def test_one_gradient_of_a_convolution_on_a_rank_without_channels(
    spec: P, transposed: bool, wanted: int
) -> None:
    """Of several results only one is asked for, and a rank has nothing to compute it of."""
    mesh = Mesh({"dp": 2}, virtual=True)
    x, w = torch.randn(1, 1, 6, 5).double(), torch.randn(1, 1, 2, 3).double()
    convolve = F.conv_transpose2d if transposed else F.conv2d

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return convolve(x, w, stride=2).sin().sum()

    derived = torch.func.grad(loss, wanted)
    for specs in ((spec, P()), (P(), spec), (spec, spec)):
        have = shard(derived, mesh, specs, P())(x, w)
        torch.testing.assert_close(have, derived(x, w))
        placed = [place(v, mesh, s) for v, s in zip((x, w), specs, strict=True)]
        torch.testing.assert_close(jit(derived, backend="eager")(*placed).full(), derived(x, w))


def test_only_the_outermost_shard_of_a_stack_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others constrain values."""
    planned: list[Mesh] = []

    def counted(graph: Any, given: Any, mesh: Mesh) -> Any:
        planned.append(mesh)
        return choose(graph, given, mesh)

    monkeypatch.setattr(improved, "choose", counted)
    mesh, x = Mesh({"tp": 2}, virtual=True), torch.ones(4, 4)
    inner = shard(lambda x: name(x.sin(), "hidden") * 2, mesh, constrain_at={"hidden": P("tp")})
    run = jit(shard(inner, mesh, out_specs=P("tp")), backend="eager")
    program = run.lower(x)
    assert planned == [mesh] and not program.collectives
    (constrained,) = [n for n in program.calls if "sin" in str(n.target)]
    assert "tp" in LAYOUT.of(constrained).split_axes
    torch.testing.assert_close(full(run(x)), x.sin() * 2)
