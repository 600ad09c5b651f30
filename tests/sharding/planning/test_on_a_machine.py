"""Plans on a given machine: closed forms, a transformer's bytes, and that no constraint helps."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, grad_and_value
from two_layouts import BOTH_WAYS, read_both_ways

from torchard import (
    Link,
    Machine,
    Mesh,
    MeshTensor,
    P,
    ShapeDtype,
    constrain,
    place,
    repeat,
    shard,
    tree,
)
from torchard.sharding.planning.minimum import plan
from torchard.sharding.planning.propagation.propagate import propagate

ENDLESS = float("inf")
COMPUTES_AT_ONCE = Machine("computes at once", {"float32": ENDLESS}, ENDLESS, link=Link(1e9))
SENDS_AT_ONCE = Machine("sends at once", {"float32": 1e12}, ENDLESS, link=Link(ENDLESS))
SIDES = st.sampled_from([8, 16, 32, 64, 128, 256])


def sent(fn: Callable[..., Any], mesh: Mesh, args: Any, machine: Machine, **specs: Any) -> int:
    collectives = shard(fn, mesh, machine=machine, **specs).lower(*args).collectives
    return sum(each.bytes * each.times for each in collectives)


@given(st.sampled_from([2, 4]), SIDES, SIDES, SIDES)
def test_a_product_whose_contraction_is_split_sends_least(n: int, m: int, k: int, p: int) -> None:
    """It is summed; or both operands are gathered; or one is, and the other one's split is moved."""
    mesh, args = Mesh({"tp": n}, virtual=True), (ShapeDtype((m, k)), ShapeDtype((k, p)))
    specs: Any = {"in_specs": (P(None, "tp"), P("tp")), "out_specs": P()}
    ways = (2 * m * p, m * k + k * p, m * k / n + k * p + m * p, k * p / n + m * k + m * p)
    assert sent(torch.mm, mesh, args, COMPUTES_AT_ONCE, **specs) == min(ways) * 4 * (n - 1) / n


def test_an_output_without_a_spec_is_complete() -> None:
    """Its sum would send more than operands by which its rows are split."""
    mesh, specs = Mesh({"tp": 4}, virtual=True), (P(None, "tp"), P("tp"))
    args, moved, gathered = (ShapeDtype((256, 8)), ShapeDtype((8, 64))), 256 * 8 / 4, 8 * 64
    assert sent(torch.mm, mesh, args, COMPUTES_AT_ONCE, in_specs=specs) == (moved + gathered) * 3


@given(SIDES, SIDES)
def test_where_sending_takes_no_time_products_are_split(m: int, k: int) -> None:
    mesh = Mesh({"tp": 4}, virtual=True)
    specs: Any = {"in_specs": (P("tp"), P()), "out_specs": P(), "machine": SENDS_AT_ONCE}
    lowered = shard(lambda x, w: x @ w @ w.T, mesh, **specs).lower(ShapeDtype((m, k)), ShapeDtype((k, 8)))
    (axis,) = lowered.work.axes
    assert axis.flops == pytest.approx(1.0, abs=0.01)


@given(st.sampled_from([(2, 4), (4, 2), (2, 2)]), SIDES, SIDES)
def test_a_slow_axis_sums_what_is_split_over_the_other(ranks: tuple[int, int], m: int, n: int) -> None:
    """Sums are scattered over the fast axis, completed over the slow one in parts, and gathered."""
    mesh = Mesh({"slow": ranks[0], "fast": ranks[1]}, virtual=True)
    machine = replace(COMPUTES_AT_ONCE, links={"slow": Link(1e8)})
    args = ShapeDtype((m, 8192)), ShapeDtype((8192, n))
    specs: Any = {"in_specs": (P(None, ("slow", "fast")), P(("slow", "fast"))), "out_specs": P()}
    lowered = shard(torch.mm, mesh, machine=machine, **specs).lower(*args)
    whole, (slow, fast) = m * n * 4, (2 * (r - 1) / r for r in ranks)
    seconds = slow * whole / ranks[1] / 1e8 + fast * whole / 1e9
    assert lowered.plan.seconds == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("rows", [4096, 256, 16])
def test_a_backward_gathers_parameters_again(rows: int) -> None:
    """The model counts both gathers: where they are more than the rows, it moves these."""
    mesh, specs = Mesh({"dp": 4}, virtual=True), ([P("dp")] * 3, P("dp"))

    def chain(params: list[Tensor], x: Tensor) -> Tensor:
        return functools.reduce(lambda x, w: torch.relu(x @ w), params, x).sum()

    args = [ShapeDtype((64, 64))] * 3, ShapeDtype((rows, 64))
    run = shard(grad(chain), mesh, specs, specs[0], machine=COMPUTES_AT_ONCE)
    lowered = run.lower(*args)
    each = sum(c.bytes * c.times for c in lowered.collectives)
    assert lowered.plan.seconds == pytest.approx(each / 1e9, rel=1e-5)
    # By hand: gathers for three products and two of the backward, and three scatters.
    assert (each == 8 * 3 / 4 * 64 * 64 * 4) == (rows > 16)


def test_what_is_gathered_for_one_is_cut_for_others() -> None:
    """The product needs x whole, and rows of x, which then are not moved as well."""
    mesh, specs = Mesh({"tp": 4}, virtual=True), {"in_specs": (P(None, "tp"),), "out_specs": P("tp")}

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ x, torch.relu(x).T

    assert sent(fn, mesh, [ShapeDtype((8, 8))], COMPUTES_AT_ONCE, **specs) == 3 / 4 * 8 * 8 * 4


@pytest.fixture
def begins_by_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "all_whole", functools.partial(propagate, sweeps=1))


def test_each_operation_is_whole_or_apart() -> None:
    """The mean of a split row is summed; softmaxes of rows that are split anyway are whole."""
    mesh, specs = Mesh({"tp": 4}, virtual=True), {"in_specs": (P(None, "tp"),) * 2}

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x - x.mean(-1, keepdim=True), torch.softmax(y, -1)

    args, out = [ShapeDtype((64, 64))] * 2, (P(None, "tp"), P("tp"))
    summed, moved = 2 * 3 / 4 * 64 * 4, 3 / 4 * 64 * 64 / 4 * 4
    assert sent(fn, mesh, args, COMPUTES_AT_ONCE, **specs, out_specs=out) == summed + moved


def test_neighbours_send_what_a_split_dim_lacks() -> None:
    mesh, rows = Mesh({"tp": 4}, virtual=True), P("tp")
    specs: Any = {"in_specs": (rows,), "out_specs": rows}
    rolled = sent(lambda x: x.roll(1, 0), mesh, [ShapeDtype((64, 64))], COMPUTES_AT_ONCE, **specs)
    assert rolled == 64 * 4


@pytest.mark.parametrize("times", [1, 3])
def test_neighbours_are_reached_by_the_link_of_their_axis(times: int) -> None:
    machine = replace(COMPUTES_AT_ONCE, links={"tp": Link(1e6, 1e-3)})

    def fn(rows: Tensor, x: Tensor) -> Tensor:
        return repeat(lambda row, x: x.roll(1, 0), rows, x)

    specs: Any = {"in_specs": (P(), P("tp")), "out_specs": P("tp"), "machine": machine}
    run = shard(fn, Mesh({"tp": 4}, virtual=True), **specs)
    lowered = run.lower(ShapeDtype((times,)), ShapeDtype((64, 64)))
    assert lowered.plan.seconds == pytest.approx(times * (1e-3 + 64 * 4 / 1e6))
    assert lowered.time(machine).seconds == pytest.approx(lowered.plan.seconds, rel=1e-3)


def test_a_computed_value_is_kept_in_two_layouts() -> None:
    """Its columns are sorted, and so also summed; its rows are sorted where they are computed."""
    mesh, specs = Mesh({"tp": 4}, virtual=True), {"in_specs": (P("tp"), P())}

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = x @ w
        return h.sort(0).values, h.sum(0), h.sort(1).values

    args, out = [ShapeDtype((16, 512)), ShapeDtype((512, 64))], (P(None, "tp"), P("tp"), P("tp"))
    moved = 3 / 4 * 16 * 64 / 4 * 4
    assert sent(fn, mesh, args, COMPUTES_AT_ONCE, **specs, out_specs=out) == moved


def test_neither_of_two_layouts_is_the_best_one_alone() -> None:
    """One move from rows to columns is enough, and to gather takes as long as four."""
    run = shard(read_both_ways, Mesh({"tp": 4}, virtual=True), **BOTH_WAYS, machine=COMPUTES_AT_ONCE)
    lowered = run.lower(ShapeDtype((64, 64)))
    assert [c.bytes for c in lowered.collectives] == [3 / 4 * 64 * 64 / 4 * 4]


def test_a_view_is_made_again_only_where_that_is_nearer() -> None:
    """Of a gathered transposed matrix, each rank has the columns that its base would be moved for."""
    mesh, specs = Mesh({"tp": 4}, virtual=True), {"in_specs": (P("tp"), P(None, "tp"))}

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(y.T, 0), torch.addmm(y.T[0], y.T, x)

    args, out = [ShapeDtype((8, 8))] * 2, (P(), P(None, "tp"))
    gathered, moved = 3 / 4 * 64 * 4, 3 / 4 * 64 / 4 * 4
    assert sent(fn, mesh, args, COMPUTES_AT_ONCE, **specs, out_specs=out) == gathered + moved


# -- a transformer ---------------------------------------------------------------------------------

WIDTH, HEADS, WORDS, LENGTH = 64, 4, 128, 32
SPLIT = {"qkv": P(None, "tp"), "o": P("tp"), "up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}


def loss(p: Any, tokens: Tensor) -> Tensor:
    """Of a GPT whose table of words is its last product."""
    x = p["words"][tokens[:, :-1]] + p["places"]
    for q in p["layers"]:
        y = F.layer_norm(x, (WIDTH,), q["g1"], q["c1"])
        heads = (y @ q["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ q["o"]
        y = F.layer_norm(x, (WIDTH,), q["g2"], q["c2"])
        x = x + F.gelu(y @ q["up"] + q["bias"], approximate="tanh") @ q["down"]
    logits = F.layer_norm(x, (WIDTH,), p["g"], p["c"]) @ p["words"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parameters() -> Any:
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=made)

    def layer() -> dict[str, Tensor]:
        w = WIDTH
        norms = {"g1": torch.ones(w), "c1": torch.zeros(w), "g2": torch.ones(w), "c2": torch.zeros(w)}
        products = {"qkv": normal(w, 3 * w), "o": normal(w, w), "up": normal(w, 4 * w)}
        return {**norms, **products, "bias": normal(4 * w), "down": normal(4 * w, w)}

    tables = {"words": normal(WORDS, WIDTH), "places": normal(LENGTH, WIDTH)}
    return {**tables, "g": torch.ones(WIDTH), "c": torch.zeros(WIDTH), "layers": [layer(), layer()]}


@pytest.mark.parametrize(
    ("axes", "batch", "most"),
    [({"tp": 4}, P(), 667_404), ({"dp": 2, "tp": 2}, P("dp"), 548_620)],
    ids=["tp", "dp and tp"],
)
def test_a_transformer_without_latencies(axes: dict[str, int], batch: P, most: int) -> None:
    """At most what an exact minimum over all layouts found; rules alone send 1,135,110 and 652,298."""
    machine = Machine("no latency", {"float32": 256e9}, 384e9, link=Link(1e9))
    params, mesh = parameters(), Mesh(axes, virtual=True)
    tokens = torch.randint(WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    of_layer = {name: SPLIT.get(name, P()) for name in params["layers"][0]}
    specs: Any = {**dict.fromkeys(params, P()), "words": P("tp"), "layers": [of_layer] * 2}
    run = shard(grad_and_value(loss), mesh, (specs, batch), (specs, P()), machine=machine)
    assert sum(each.bytes for each in run.lower(params, tokens).collectives) <= most
    want = tree.map(lambda x: x.double(), grad_and_value(loss)(params, tokens))
    got = run(place(params, mesh, specs), tokens)
    for mine, other in zip(tree.leaves(got), tree.leaves(want), strict=True):
        whole = mine.full() if isinstance(mine, MeshTensor) else mine
        torch.testing.assert_close(whole.double(), other, rtol=1e-4, atol=1e-5)


def moments(w: Tensor, gradients: Tensor) -> Any:
    return gradients.square().mean(0), gradients.mean(0)


def clipped(w: Tensor, gradients: Tensor) -> Any:
    sizes = gradients.square().sum(1, keepdim=True).sqrt()
    return w - 0.1 * (gradients / sizes.clamp(min=1)).sum(0)


@pytest.mark.parametrize("update", [moments, clipped])
def test_gradients_of_examples_are_summed_not_gathered(update: Callable[..., Any]) -> None:
    """Sums of what is returned are merged; gathers of the examples' gradients are not."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Any:
        loss = torch.func.grad(lambda w, x, y: (torch.tanh(x * w).sum() - y).square())
        return update(w, torch.func.vmap(loss, (None, 0, 0))(w, x, y))

    machine = Machine("m", {"float32": 1e11}, 1e10, link=Link(1e9, 1e-5))
    run = shard(step, Mesh({"dp": 4}, virtual=True), (P(), P("dp"), P("dp")), P(), machine=machine)
    args = ShapeDtype((32,)), ShapeDtype((64, 32)), ShapeDtype((64,))
    assert [c.kind for c in run.lower(*args).collectives] == ["all_reduce"]


def test_gathers_that_are_merged_share_a_latency() -> None:
    """The weights of each layer are gathered by one call, in place of two sums of activations."""
    params, mesh = parameters(), Mesh({"tp": 4}, virtual=True)
    of_layer = {name: SPLIT.get(name, P()) for name in params["layers"][0]}
    specs: Any = {**dict.fromkeys(params, P()), "words": P("tp"), "layers": [of_layer] * 2}
    machine = Machine("latencies", {"float32": 256e9}, 384e9, link=Link(1e9, 300e-6))
    run = shard(grad_and_value(loss), mesh, (specs, P()), (specs, P()), machine=machine)
    tokens = torch.zeros(8, LENGTH + 1, dtype=torch.int64)
    assert len(run.lower(place(params, mesh, specs), tokens).collectives) == 3


# -- no constraint helps ---------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mm,
    "sum": torch.add,
    "relu": lambda x, y: torch.relu(x),
    "transposed": lambda x, y: x.T,
    "scaled": lambda x, y: x * y.sum(0),
    "halves": lambda x, y: torch.cat([x[:4], y[4:]]),
    "centred": lambda x, y: x - x.sum(0, keepdim=True) / 8,
    "normed": lambda x, y: x / (1 + x.square().sum(-1, keepdim=True)),
    "bias": lambda x, y: torch.addmm(x[0], x, y),
    "mean": lambda x, y: x - x.mean(0, keepdim=True),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "softmax of columns": lambda x, y: torch.softmax(x, 0),
    "layer norm": lambda x, y: F.layer_norm(x, (8,)),
    "logsumexp": lambda x, y: x - x.logsumexp(1, keepdim=True),
    "variance": lambda x, y: x * x.var(1, keepdim=True),
    "largest": lambda x, y: x / (1 + x.abs().amax(0)),
    "rolled": lambda x, y: torch.roll(x, 1, 0) + y,
    "running sum": lambda x, y: x.cumsum(1) / 8,
}


class Drawn:
    """A random program of two to eight operations on three matrices, two of whose values it returns."""

    def __init__(self, seed: int, mesh: Mesh, count: int | None = None) -> None:
        self.drawn, self.mesh = random.Random(seed), mesh
        self.count = count or self.drawn.randint(2, 8)
        self.steps = [
            (self.drawn.choice([*OPERATIONS.values()]), *self.two(3 + i)) for i in range(self.count)
        ]
        made = torch.Generator().manual_seed(seed)
        self.args = torch.randn(3, 8, 8, dtype=torch.float64, generator=made).unbind()
        self.specs: Any = {
            "in_specs": tuple(self.spec() for _ in range(3)),
            "out_specs": tuple(self.spec() for _ in range(2)),
        }

    def two(self, count: int) -> tuple[int, int]:
        return self.drawn.randrange(count), self.drawn.randrange(count)

    def spec(self) -> P:
        dims: list[str | None] = [None, None]
        for axis in self.mesh.axes:
            at = self.drawn.randrange(3)
            if at < 2 and dims[at] is None:
                dims[at] = axis
        return P(*dims)

    def program(self, asked: Mapping[int, P] | None = None) -> Callable[..., Any]:
        """The program, with the values of some operations constrained."""

        def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
            values = [*args]
            for i, (operation, a, b) in enumerate(self.steps):
                value = operation(values[a], values[b])
                values.append(constrain(value, asked[i]) if asked and i in asked else value)
            return values[-1], values[-2]

        return fn

    def sent(self, asked: Mapping[int, P] | None = None) -> int:
        program = self.program(asked)
        return sent(program, self.mesh, self.args, COMPUTES_AT_ONCE, **self.specs)


MESHES = {"tp": Mesh({"tp": 4}, virtual=True), "2x2": Mesh({"dp": 2, "tp": 2}, virtual=True)}


@pytest.mark.parametrize("seed", range(examples(ci=30, explore=2000)))
@pytest.mark.parametrize("axes", MESHES)
def test_no_constraint_helps(axes: str, seed: int) -> None:
    """The plan is the minimum, so that with a constraint it sends no less."""
    drawn = Drawn(seed, MESHES[axes])
    run = shard(drawn.program(), drawn.mesh, machine=COMPUTES_AT_ONCE, **drawn.specs)
    for mine, want in zip(run(*drawn.args), drawn.program()(*drawn.args), strict=True):
        torch.testing.assert_close(mine.full() if isinstance(mine, MeshTensor) else mine, want)
    free = drawn.sent()
    for at in range(drawn.count):
        spec = drawn.spec()
        assert free <= drawn.sent({at: spec}), (at, spec)


@pytest.mark.parametrize(("seed", "least"), [(7, 512), (12, 640)])
def test_axes_change_together(seed: int, least: int) -> None:
    """Along one axis at a time, these plans send a twentieth or an eighth more."""
    assert Drawn(seed, MESHES["2x2"]).sent() == least


@pytest.mark.parametrize("seed", range(examples(ci=20, explore=2000)))
def test_it_does_not_matter_how_a_plan_begins(seed: int, request: pytest.FixtureRequest) -> None:
    drawn = Drawn(seed, MESHES["tp"])
    known = drawn.sent()
    request.getfixturevalue("begins_by_propagation")
    assert drawn.sent() == known


@pytest.mark.parametrize("seed", range(examples(ci=3, explore=200)))
@pytest.mark.parametrize(("axes", "count"), [("tp", 4), ("2x2", 2)])
def test_no_layouts_of_all_values_send_less(axes: str, count: int, seed: int) -> None:
    """By brute force: each value in each layout."""
    drawn = Drawn(seed, MESHES[axes], count)
    every = itertools.product(list(all_specs(drawn.mesh)), repeat=count)
    assert drawn.sent() <= min(drawn.sent(dict(enumerate(specs))) for specs in every)


def all_specs(mesh: Mesh) -> Iterator[P]:
    """All specs of a matrix on one axis or two."""
    for order in itertools.permutations(mesh.axes):
        for dims in itertools.product((0, 1, None), repeat=len(order)):
            split = [tuple(a for a, at in zip(order, dims, strict=True) if at == d) for d in (0, 1)]
            if order == tuple(mesh.axes) or any(len(axes) > 1 for axes in split):
                yield P(*split)


# -- no fixed dim is better than an open one ------------------------------------------------------

OPEN = P.UNCONSTRAINED
ALLOWED: dict[P, tuple[P, ...]] = {
    P(OPEN, None): (P(), P("tp")),
    P(None, OPEN): (P(), P(None, "tp")),
    P(OPEN, OPEN): (P(), P("tp"), P(None, "tp")),
    P("tp", OPEN): (P("tp"),),
    P(OPEN, "tp"): (P(None, "tp"),),
}


# In 178 and 203, the layouts of what reads a value are needed.
@pytest.mark.parametrize("seed", sorted({*range(examples(ci=10, explore=1000)), 178, 203}))
def test_no_fixed_dim_is_better_than_an_open_one(seed: int) -> None:
    """Its plan sends no more, or takes no more seconds in the model.

    The model does not count that a value is moved once for itself and its views.
    """
    drawn = Drawn(seed, MESHES["tp"])
    step = drawn.drawn.randrange(drawn.count)
    known = {spec: planned(drawn, step, spec) for spec in {*ALLOWED, *sum(ALLOWED.values(), ())}}
    for spec, others in ALLOWED.items():
        for other in others:
            (mine, counted), (least, model) = known[spec], known[other]
            assert mine <= least or counted <= model * (1 + 1e-6), (step, spec, other)


def planned(drawn: Drawn, step: int, spec: P) -> tuple[int, float]:
    """What the plan of a program with a constraint sends, and its seconds in the model."""
    run = shard(drawn.program({step: spec}), drawn.mesh, machine=COMPUTES_AT_ONCE, **drawn.specs)
    for mine, want in zip(run(*drawn.args), drawn.program()(*drawn.args), strict=True):
        torch.testing.assert_close(mine.full() if isinstance(mine, MeshTensor) else mine, want)
    lowered = run.lower(*drawn.args)
    return sum(each.bytes * each.times for each in lowered.collectives), lowered.plan.seconds
