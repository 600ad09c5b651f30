"""Mixed precision: casts change neither the number of collectives nor what their dtypes require."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import Mesh, P, checkpoint, constrain, full, jit, place, repeat, shard
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.collectives import op_of
from torchard.testing import prove

WIDTH, LAYERS, RANKS = 6, 4, 2
SHAPES = {"up": (8, WIDTH), "down": (WIDTH, 8), "bias": (8,), "scale": (WIDTH,)}
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MESH = Mesh({"dp": RANKS}, virtual=True)
Params = dict[str, Any]
Loss = Callable[[Params, torch.Tensor], torch.Tensor]


def layer(p: Params, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    up, down, bias, scale = (p[name].to(dtype) for name in SHAPES)
    return x + torch.tanh((x * scale) @ up.T + bias) @ down.T


def loss_in(dtype: torch.dtype, stacked: bool, recomputed: bool = False) -> Loss:
    """The loss of a model that casts its parameters to a dtype where it uses them."""

    def block(p: Params, x: torch.Tensor) -> torch.Tensor:
        return layer(p, x, dtype)

    if recomputed:
        block = checkpoint(block)

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype) @ params["first"].to(dtype)
        if stacked:
            x = repeat(block, params["layers"], x)
        else:
            for p in params["layers"]:
                x = block(p, x)
        return (x @ params["last"].to(dtype)).square().mean()

    return loss


def model(dtype: torch.dtype, stacked: bool) -> Params:
    seed = torch.Generator().manual_seed(LAYERS)

    def tensor(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=F64, generator=seed) / 2).to(dtype)

    ends = {"first": tensor(4, WIDTH), "last": tensor(WIDTH, 4)}
    layers = {name: tensor(LAYERS, *shape) for name, shape in SHAPES.items()}
    rows = [{name: value[i] for name, value in layers.items()} for i in range(LAYERS)]
    return {**ends, "layers": layers if stacked else rows}


def specs_of(stacked: bool) -> Params:
    layers: Any = P(None, "dp") if stacked else P("dp")
    return {"first": P("dp"), "last": P("dp"), "layers": layers}


def sharded(loss: Loss, specs: Params, updates: bool, **how: Any) -> Any:
    def step(params: Params, x: torch.Tensor) -> Params:
        slopes = torch.func.grad(loss)(params, x)
        if not updates:
            return slopes
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, slopes)

    return shard(step, MESH, out_specs=specs, **how), step


def inputs() -> torch.Tensor:
    return torch.randn(3 * RANKS, 4, generator=torch.Generator().manual_seed(1), dtype=F64).float()


def calls(plan: Any) -> Counter[Any]:
    return Counter((c.kind, c.phase, c.shape, c.note) for c in plan.collectives)


def compare(have: Params, want: Params, **close: float) -> None:
    for a, b in zip(optree.tree_leaves(have), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(full(a), b, **close)


@settings(max_examples=examples(6, 100))
@given(
    dtypes=st.sampled_from([(F32, BF16), (BF16, F32), (F64, F32), (F32, F64)]),
    stacked=st.booleans(),
    updates=st.booleans(),
    recomputed=st.booleans(),
)
def test_a_plan_with_casts_has_the_calls_of_one_without(
    dtypes: tuple[torch.dtype, torch.dtype], stacked: bool, updates: bool, recomputed: bool
) -> None:
    """Gathers send the narrower dtype; sums the dtype in which the gradient is computed."""
    held, used = dtypes
    params, specs, x = model(held, stacked), specs_of(stacked), inputs()
    loss = loss_in(used, stacked, recomputed)
    run, step = sharded(loss, specs, updates)
    args = place(params, MESH, specs), place(x, MESH, P("dp"))
    plan = run.lower(*args)
    plain, _ = sharded(loss_in(held, stacked, recomputed), specs, updates)
    assert calls(plan) == calls(plain.lower(*args)), plan.collectives
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    sent = {(c.kind, c.dtype) for c in plan.collectives}
    assert sent == {("all_gather", narrow), ("psum_scatter", used)}
    assert all(c.bytes == c.dtype.itemsize * rows(c) for c in plan.collectives)
    prove(plan)
    close = {"rtol": 0.1, "atol": 0.05} if BF16 in dtypes else {"rtol": 1e-5, "atol": 1e-6}
    compare(run(*args), step(params, x), **close)


def rows(record: Any) -> int:
    """The elements that a rank sends."""
    count = torch.Size(record.shape).numel()
    return count // RANKS if record.kind == "psum_scatter" else count * (RANKS - 1)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_gradients_taken_outside(stacked: bool) -> None:
    """A forward and a backward of their own; and compiled code."""
    params, specs, x = model(F64, stacked), specs_of(stacked), inputs()
    loss = loss_in(F32, stacked)
    inner = shard(loss, MESH)
    args = place(params, MESH, specs), place(x, MESH, P("dp"))
    want = torch.func.grad(loss)(params, x)
    compare(torch.func.grad(inner)(*args), want, rtol=1e-5, atol=1e-6)
    compare(torch.func.grad(jit(inner, backend="eager"))(*args), want, rtol=1e-5, atol=1e-6)


def test_casts_made_by_autocast() -> None:
    """Of transposed weights: one call for the weights, one for what stays in float32."""

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        for p in params["layers"]:
            with torch.autocast("cpu", dtype=BF16):
                hidden = torch.nn.functional.linear(x * p["scale"], p["up"], p["bias"])
                x = x + torch.nn.functional.linear(hidden.tanh(), p["down"])
        return x.square().mean()

    layers = model(F32, False)["layers"]
    run, step = sharded(loss, {"layers": P("dp")}, False)
    params, x = {"layers": layers}, torch.randn(3 * RANKS, WIDTH)
    args = place(params, MESH, P("dp")), place(x, MESH, P("dp"))
    notes = Counter(
        (c.kind, c.phase, c.dtype, c.note) for c in run.lower(*args).collectives if c.note
    )
    assert notes == {
        ("all_gather", "forward", BF16, "3 merged"): LAYERS,
        ("all_gather", "backward", BF16, "2 merged"): LAYERS,
        ("psum_scatter", "backward", BF16, "3 merged"): LAYERS,
    }
    compare(run(*args), step(params, x), rtol=0.1, atol=0.05)


# -- sums in a wider dtype --------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("spec", [P(), P("dp")], ids=["replicated", "split"])
def test_wide_sums_are_merged_as_narrow_ones(spec: P, stacked: bool) -> None:
    specs = specs_of(stacked) if spec.axes else P()
    args = place(model(BF16, stacked), MESH, specs), place(inputs(), MESH, P("dp"))
    plans = [
        sharded(loss_in(BF16, stacked), specs, False, reduce_dtype=dtype)[0].lower(*args)
        for dtype in (None, F32)
    ]
    assert calls(plans[0]) == calls(plans[1])
    assert {c.dtype for c in plans[1].collectives if c.kind != "all_gather"} == {F32}


def test_two_buckets_are_held_in_the_wider_dtype() -> None:
    """Gradients summed in float32 are narrowed when the second bucket after them is issued."""
    specs = specs_of(False)
    args = place(model(BF16, False), MESH, specs), place(inputs(), MESH, P("dp"))
    run, _ = sharded(loss_in(BF16, False), specs, False, reduce_dtype=F32)
    held, most = set[Any](), 0
    for node in run.lower(*args).graph.nodes:
        op = op_of(node)
        if op is not None and op.reduction == "sum":
            held.add(node)
        elif node.target is torch.ops.aten._to_copy.default:
            held.discard(of_view(node.args[0]))
        most = max(most, len(held))
    assert not held
    assert most <= 2 * len(SHAPES) + 2 < LAYERS * len(SHAPES)


def of_view(node: Any) -> Any:
    while is_alias(node):
        (node,) = node.all_input_nodes
    return node


# -- other moves -------------------------------------------------------------------------------------


def test_activations_are_gathered_in_the_narrower_dtype() -> None:
    def narrowed(x: torch.Tensor) -> torch.Tensor:
        return constrain(constrain(x.sin(), P("dp")), P()).to(BF16).cos()

    def widened(x: torch.Tensor) -> torch.Tensor:
        return constrain(x.to(BF16).sin().to(F32), P()).cos()

    x = torch.randn(8, 3)
    for fn in (narrowed, widened):
        run = shard(fn, MESH, P("dp"), P())
        (gather,) = run.lower(x).collectives
        assert (gather.kind, gather.dtype, gather.bytes) == ("all_gather", BF16, 4 * 3 * 2)
        assert torch.equal(run(x), fn(x))


def test_a_value_is_gathered_once_for_both_dtypes() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.sin()
        return constrain(x, P()).cos(), constrain(x.to(F64), P()).exp()

    x = torch.randn(8, 3)
    run = shard(both, MESH, P("dp"), P())
    (gather,) = run.lower(x).collectives
    assert (gather.kind, gather.dtype) == ("all_gather", F32)
    for have, want in zip(run(x), both(x), strict=True):
        assert torch.equal(have, want)
