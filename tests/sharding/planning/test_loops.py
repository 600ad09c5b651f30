"""Plans of programs with repeat: those of the unrolled program, found once for all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
import train_gpt
from any_size import fuse
from torch.func import grad

from torchard import (
    Mesh,
    P,
    Schedule,
    SpecError,
    UnrolledLoopWarning,
    checkpoint,
    machines,
    name,
    nn,
    place,
    policies,
    random,
    repeat,
    scan,
    scope,
    shard,
    stack,
    value_and_grad,
)
from torchard.functional.programs.loops import issued_ahead, regrouped
from torchard.functional.programs.markers import again
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LAYOUT, LOOP, VAL
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.sharding import MeshTensor
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.tags import BUCKET
from torchard.testing import Unproved, prove

SIZE = train_gpt.Size(context=16, width=32, heads=4, layers=3)
PARAMS = train_gpt.init(SIZE, random.key(0))
STACKED = {**PARAMS, "blocks": stack(PARAMS["blocks"])}
BATCH = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))


def logits(params: Any, context: torch.Tensor) -> torch.Tensor:
    """The model of examples/train_gpt.py, with stacked blocks."""

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = name(x + train_gpt.attention(SIZE, p, train_gpt.norm(p["norm1"], x)), "stream")
        return name(x + train_gpt.mlp(p, train_gpt.norm(p["norm2"], x)), "stream")

    with scope("embedding"):
        places = params["positions"][: context.shape[1]]
        x = name(nn.embedding(params["embedding"], context) + places, "stream")
    x = repeat(block, params["blocks"], x)
    with scope("head"):
        return nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])


def rolled(params: Any, batch: torch.Tensor) -> torch.Tensor:
    scores = logits(params, batch[:, :-1])
    with scope("loss"):
        return nn.cross_entropy(scores, batch[:, 1:])


listed = partial(train_gpt.loss, SIZE)
WANTED = grad(listed)(PARAMS, BATCH)
WANTED_STACKED = {**WANTED, "blocks": stack(WANTED["blocks"])}


def specs(plan: str, stacked: bool) -> Any:
    if plan in ("dp", "fsdp"):
        split = P("dp") if plan == "fsdp" else P()
        return {**dict.fromkeys(PARAMS, split), "blocks": split.led(1) if stacked else split}
    by_name = train_gpt.megatron(SIZE, "dp" if plan == "fsdp+tp" else None)
    return {**by_name, "blocks": stack(by_name["blocks"])} if stacked else by_name


BOTH = {"dp": 2, "tp": 2}
PLANS = {"dp": {"dp": 2}, "fsdp": {"dp": 2}, "tp": {"tp": 2}, "dp+tp": BOTH, "fsdp+tp": BOTH}


def case(plan: str, stacked: bool, wrap: Callable[..., Any] = lambda f: f) -> tuple[Program, Any]:
    """The plan of a gradient, and the gradient."""
    mesh = Mesh(PLANS[plan], virtual=True)
    params = place(STACKED if stacked else PARAMS, mesh, specs(plan, stacked))
    batch = place(BATCH, mesh, P("dp" if "dp" in PLANS[plan] else None))
    run = shard(wrap(grad(rolled if stacked else listed)), mesh)
    return run.lower(params, batch), run(params, batch)


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full() if isinstance(tree, MeshTensor) else tree


def summed(program: Program) -> Counter[Any]:
    """The bytes of each kind of collective, whichever of them are merged."""
    total: Counter[Any] = Counter()
    for c in program.collectives:
        total[c.kind, c.axes, c.dtype, c.phase] += c.bytes
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS)
def test_moves_what_the_unrolled_program_moves(plan: str) -> None:
    program, gradients = case(plan, stacked=True)
    unrolled, _ = case(plan, stacked=False)
    assert has_loops(program)
    assert summed(program) == summed(unrolled)
    torch.testing.assert_close(whole(gradients), WANTED_STACKED, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
def test_the_plan_is_proved(plan: str) -> None:
    program, _ = case(plan, stacked=True)
    assert not prove(program).assumed


def test_a_carry_that_the_next_iteration_takes_in_another_layout_is_not_proved() -> None:
    program, _ = case("fsdp", stacked=True)
    program = program.copy()
    handed = next(node for node in program.graph.nodes if node.target is again)
    entered: Any = handed.args[1]
    LAYOUT.set(entered, Layout.replicated(tuple(VAL.of(entered).shape)))
    with pytest.raises(Unproved, match="the next iteration takes it in a different layout"):
        prove(program)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_are_issued_so_many_layers_ahead(prefetch: int) -> None:
    mesh = Mesh(PLANS["fsdp"], virtual=True)
    params, batch = place(STACKED, mesh, specs("fsdp", True)), place(BATCH, mesh, P("dp"))
    program = shard(grad(rolled), mesh, schedule=Schedule(prefetch=prefetch)).lower(params, batch)
    loops = groupby(regrouped(program.graph), key=LOOP.get)
    ahead = [issued_ahead(list(nodes)) for loop, nodes in loops if loop is not None]
    assert [distance for _, distance in ahead] == [prefetch, prefetch]  # of the forward and backward
    assert all(bool(nodes) == bool(prefetch) for nodes, _ in ahead)


def test_an_unrolled_loop_gathers_each_layer_by_itself() -> None:
    mesh = Mesh(PLANS["fsdp"], virtual=True)
    params, batch = place(STACKED, mesh, specs("fsdp", True)), place(BATCH, mesh, P("dp"))
    program = unrolled(shard(rolled, mesh).lower_joint(params, batch, argnums=0))
    found = Counter(BUCKET.of(node) for node in program.calls if BUCKET.on(node))
    assert len(found) > 2 * SIZE.layers
    assert all(count == bucket.members for bucket, count in found.items())


def test_gathers_each_layer_by_one_call_and_again_for_its_gradient() -> None:
    program, _ = case("fsdp", stacked=True)
    gathers = [c for c in program.collectives if c.kind == "all_gather" and c.scope.startswith("block/")]
    assert Counter((c.phase, c.scope) for c in gathers) == {
        (phase, f"block/{i}"): 1 for phase in ("forward", "backward") for i in range(SIZE.layers)
    }
    # Gradients are scattered as they are computed: none of a layer's is held whole for all layers.
    scatters = [c for c in program.collectives if c.kind == "psum_scatter"]
    assert {c.scope for c in scatters} >= {f"block/{i}" for i in range(SIZE.layers)}
    assert f"× {SIZE.layers}" in str(program.collectives)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("plan", ["tp", "fsdp"])
@pytest.mark.parametrize(
    "policy",
    [
        policies.save_nothing,
        policies.save_dots,
        policies.save_everything,
        policies.save_names("stream"),
        policies.offload_names("stream"),
        policies.Policy(lambda op, shapes, scope, name: scope == "block/1", "one layer"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", [None, "block/*"])
def test_peaks_under_policies(plan: str, policy: policies.Policy, where: str | None) -> None:
    """No more than the unrolled program, but for stacked and separate parameters."""

    def kept(fn: Callable[..., Any]) -> Callable[..., Any]:
        return checkpoint(fn, policy=policy, where=where)

    if where is not None and policy.labels:
        pytest.skip("a label that is also outside of the layers")
    program, gradients = case(plan, True, kept)
    unrolled, _ = case(plan, False, kept)
    assert program.peak <= 1.02 * unrolled.peak
    torch.testing.assert_close(whole(gradients), WANTED_STACKED, rtol=1e-4, atol=1e-6)


def test_kernels_are_matched_once() -> None:
    program, gradients = case("tp", True, partial(fuse, compiler="eager"))
    unrolled, _ = case("tp", False, partial(fuse, compiler="eager"))
    assert has_loops(program)
    assert len(program.kernels) == len(unrolled.kernels)
    assert {u.scope for u in program.kernels} >= {f"block/{i}" for i in range(SIZE.layers)}
    torch.testing.assert_close(whole(gradients), WANTED_STACKED, rtol=1e-4, atol=1e-6)


def test_a_pattern_that_tells_layers_apart() -> None:
    """It unrolls the loop, and says so once."""
    mesh = Mesh({"tp": 2}, virtual=True)
    run = shard(rolled, mesh, constrain_at={"block/1/stream": P(None, "tp")})
    with pytest.warns(UnrolledLoopWarning, match=r"\['block/1/stream'\].* write 'block/\*/stream'"):
        program = run.lower(STACKED, BATCH)
    assert not has_loops(program)
    torch.testing.assert_close(run(STACKED, BATCH), listed(PARAMS, BATCH))
    together = shard(rolled, mesh, constrain_at={"block/*/stream": P(None, "tp")})
    assert has_loops(together.lower(STACKED, BATCH))
    torch.testing.assert_close(together(STACKED, BATCH), listed(PARAMS, BATCH))


def test_constraints_inside_of_a_trace_keep_the_loop() -> None:
    """Their patterns are over all scopes, those around the loop too."""
    mesh = Mesh({"tp": 2}, virtual=True)
    run = shard(scope("model")(rolled), mesh, constrain_at={"model/block/*/stream": P(None, "tp")})
    inside = shard(lambda params, batch: 1.0 * run(params, batch), mesh)
    programs = [f.lower(STACKED, BATCH) for f in (run, inside)]
    assert all(map(has_loops, programs))
    found = [Counter((c.kind, c.shape) for c in program.collectives) for program in programs]
    assert found[0] == found[1] != Counter()
    torch.testing.assert_close(inside(STACKED, BATCH), listed(PARAMS, BATCH))
    missing = shard(rolled, mesh, constrain_at={"nowhere/*": P(None, "tp")})
    with pytest.raises(SpecError, match=r"'nowhere/\*'.* matches no .*stream"):
        shard(lambda params, batch: 1.0 * missing(params, batch), mesh).lower(STACKED, BATCH)


def test_carries_that_only_the_next_iteration_reads() -> None:
    """On a given machine, each operation that the output needs stays, in any iteration."""

    def loss(layers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: torch.tanh(x @ w), layers, x).square().mean()

    made = torch.Generator().manual_seed(0)
    layers, x = torch.randn(3, 8, 8, generator=made), torch.randn(8, 8, generator=made)
    mesh = Mesh({"tp": 2}, virtual=True)
    for specs in ((P(), P("tp")), (P(None, None, "tp"), P())):
        run = shard(grad(loss), mesh, specs, P(), machine=machines.h100())
        torch.testing.assert_close(run(layers, x), grad(loss)(layers, x))


@pytest.mark.parametrize("first", ["zeros", "zeros like x", "first row"])
def test_what_follows_a_recurrence_is_split_as_its_carry(first: str) -> None:
    """Also if the carry begins as a constant: the value and gradient of a mean are one all_reduce."""
    mesh = Mesh({"dp": 4}, virtual=True)
    p = {"in": torch.randn(16, 16), "state": torch.randn(16, 16)}

    def loss(p: dict[str, torch.Tensor], xs: torch.Tensor) -> torch.Tensor:
        begin = {
            "zeros": xs.new_zeros(8, 16),
            "zeros like x": torch.zeros_like(xs[:, 0]),
            "first row": xs[:, 0],
        }[first]
        last, _ = scan(
            lambda s, x: (torch.tanh(x @ p["in"] + s @ p["state"]), None), begin, xs.movedim(1, 0)
        )
        return (last - 0.5).square().mean()

    run = shard(value_and_grad(loss), mesh, in_specs=(P(), P("dp")))
    rows = run.lower(p, torch.randn(8, 12, 16)).collectives
    assert [(row.kind, tuple(row.shape)) for row in rows] == [("all_reduce", (2 * 16 * 16 + 1,))]
