"""S0 and S4: values and gradients of one device, with exactly the expert's collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import (
    S0,
    S4,
    Seed,
    kinds,
    outputs_and_gradients,
    sharded_arguments,
    train,
)

from torchard import Mesh, P, optim, place, shard

S0_SMALL = dataclasses.replace(S0, sizes=(64, 64, 64), batch=(2, 8))
S0_FORWARD = [("forward", "all_reduce")]
S4_FORWARD = [("forward", "all_gather"), ("forward", "psum_scatter")]
CASES = [
    pytest.param(S0, 2, id="S0-2"),
    pytest.param(S0, 4, id="S0-4"),
    pytest.param(S4, 3, id="S4-3"),
]


def virtual(n: int) -> Mesh:
    return Mesh({"tp": n}, virtual=True)


@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_equals_one_device(seed: Seed, ranks: int) -> None:
    params, x, ct = seed.normal(torch.float64)
    mesh = virtual(ranks)
    want = outputs_and_gradients(seed.forward, params, x, ct)
    have = outputs_and_gradients(
        shard(seed.forward, mesh, out_specs=seed.out_spec),
        *sharded_arguments(seed, mesh, params, x),
        ct,
    )
    assert have.keys() == want.keys()
    for name, value in want.items():
        error = (have[name] - value).abs().max() / value.abs().max()
        assert error <= 1e-12, f"{name}: {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_small_integers_are_exact(seed: Seed, ranks: int, dtype: torch.dtype) -> None:
    seed = dataclasses.replace(seed, activation=F.relu)
    params, x, ct = seed.integers(dtype)
    exact = outputs_and_gradients(
        seed.forward, {k: v.double() for k, v in params.items()}, x.double(), ct.double()
    )
    assert all(v.abs().max() <= 256 for v in exact.values()), "not exact in bf16: the test is void"
    assert all(v.abs().max() > 0 for v in exact.values()), "nothing to compare: the test is void"
    mesh = virtual(ranks)
    have = outputs_and_gradients(
        shard(seed.forward, mesh, out_specs=seed.out_spec),
        *sharded_arguments(seed, mesh, params, x),
        ct,
    )
    for name, value in exact.items():
        assert torch.equal(have[name].double(), value), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_s0(ranks: int) -> None:
    params, x, _ = S0.normal(torch.float32)
    mesh = virtual(ranks)
    placed, x = sharded_arguments(S0, mesh, params, x)
    run = shard(S0.forward, mesh, out_specs=P())
    assert kinds(run.lower(placed, x).collectives) == S0_FORWARD
    both = run.lower_joint(placed, x).collectives
    assert kinds(both) == [("backward", "all_reduce"), ("forward", "all_reduce")]
    assert [r.shape for r in both] == [(1024, 1024)] * 2
    wire = 2 * (ranks - 1) * 1024 * 1024 * 4 // ranks
    assert [r.bytes for r in both] == [wire] * 2
    # No one asked for the input's gradient: nothing is sent for it.
    assert kinds(run.lower_joint(placed, x, argnums=0).collectives) == S0_FORWARD


def test_s0_reduces_between_the_matmul_and_its_bias() -> None:
    params, x, _ = S0_SMALL.normal(torch.float64)
    mesh = virtual(2)
    placed, x = sharded_arguments(S0_SMALL, mesh, params, x)
    program = shard(S0_SMALL.forward, mesh).lower(placed, x)
    (reduce,) = [n for n in program.calls if "collective" in n.meta]
    assert reduce.all_input_nodes[0].target is torch.ops.aten.mm.default
    (after,) = reduce.users
    assert after.target is torch.ops.aten.add.Tensor


def test_gradients_of_some_arguments_plan_nothing_for_the_others() -> None:
    """Also after gradients of all were planned: no cached shape of the plan leaks."""
    params, x, ct = S0_SMALL.normal(torch.float64)
    mesh = virtual(2)
    placed, x = sharded_arguments(S0_SMALL, mesh, params, x)
    run = shard(lambda p, x, c: (S0_SMALL.forward(p, x) * c).sum(), mesh)
    torch.func.grad(run, argnums=(0, 1))(placed, x, ct)
    assert kinds(run.lower_joint(placed, x, ct, argnums=0).collectives) == S0_FORWARD
    assert len(run.lower_joint(placed, x, ct, argnums=(0, 1)).collectives) == 2


def test_collectives_of_s4() -> None:
    params, x, _ = S4.normal(torch.float32)
    mesh = virtual(3)
    placed, x = sharded_arguments(S4, mesh, params, x)
    run = shard(S4.forward, mesh, out_specs=S4.out_spec)
    assert kinds(run.lower(placed, x).collectives) == S4_FORWARD
    bias = ("backward", "all_reduce")
    mirrored = [("backward", "all_gather"), ("backward", "psum_scatter")]
    both = run.lower_joint(placed, x).collectives
    assert kinds(both) == sorted([*S4_FORWARD, *mirrored, bias])
    (small,) = [r for r in both if r.kind == "all_reduce"]
    assert small.shape in ((1, 5), (5,))
    without_input = run.lower_joint(placed, x, argnums=0).collectives
    assert kinds(without_input) == sorted([*S4_FORWARD, mirrored[0], bias])


def test_s4_has_uneven_hidden_shards() -> None:
    params, x, _ = S4.normal(torch.float32)
    mesh = virtual(3)
    placed, x = sharded_arguments(S4, mesh, params, x)
    assert [p.shape[0] for p in placed["w1"].parts] == [11, 11, 10]
    assert [p.shape[1] for p in x.parts] == [4, 4, 4]
    out = shard(S4.forward, mesh, out_specs=S4.out_spec)(placed, x)
    assert out.spec == P(None, "tp", None)
    assert [p.shape for p in out.parts] == [torch.Size([4, 4, 5])] * 3


@pytest.mark.parametrize(
    ("seed", "ranks"), [(S0_SMALL, 2), (S0_SMALL, 4), (S4, 3)], ids=["S0-2", "S0-4", "S4-3"]
)
def test_ten_steps_of_adamw_track_one_device(seed: Seed, ranks: int) -> None:
    params, x, ct = seed.normal(torch.float64)
    mesh = virtual(ranks)
    want, ends = train(seed.forward, params, x, ct, 10)
    have, got = train(seed.forward, *sharded_arguments(seed, mesh, params, x), ct, 10)
    assert want[-1] != want[0]
    assert have == pytest.approx(want, rel=1e-9)
    for name, value in ends.items():
        torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10)


def test_colwise_rowwise_needs_no_spec_on_activations() -> None:
    """From the parameters' specs alone: the hidden activation is split, nothing is gathered."""
    params, x, _ = S0_SMALL.normal(torch.float64)
    mesh = virtual(4)
    placed, x = sharded_arguments(S0_SMALL, mesh, params, x)
    program = shard(S0_SMALL.forward, mesh).lower(placed, x)
    (gelu,) = [n for n in program.calls if n.target is torch.ops.aten.gelu.default]
    assert gelu.meta["layout"].split_axes == ("tp",)
    assert not any(r.kind == "all_gather" for r in program.collectives)


def test_data_parallel_reduces_each_gradient_once() -> None:
    params, x, _ = S0_SMALL.normal(torch.float64)
    mesh = Mesh({"dp": 2}, virtual=True)
    placed = place(params, mesh, P())
    batch = place(x, mesh, P("dp"))
    run = shard(lambda p, x: S0_SMALL.forward(p, x).square().mean(), mesh)
    found = run.lower_joint(placed, batch, argnums=0).collectives
    gradients = [r for r in found if r.phase == "backward"]
    assert [r.kind for r in gradients] == ["all_reduce"]  # of all four gradients at once
    assert [r.shape for r in gradients] == [(sum(p.numel() for p in params.values()),)]
    assert [r.kind for r in found if r.phase == "forward"] == ["all_reduce"]  # the scalar loss


OPTIMIZERS = {
    "sgd": optim.sgd(0.1),  # whose rate meets a gradient that is not reduced yet
    "momentum": optim.sgd(0.1, momentum=0.9),
    "adamw": optim.adamw(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_after_the_gradients_still_leaves_one_reduction(name: str) -> None:
    """The last gradient is used before the end, as all are; the others can wait for it."""
    params, x, ct = S0_SMALL.normal(torch.float64)
    mesh = Mesh({"dp": 2}, virtual=True)
    optimizer = OPTIMIZERS[name]

    def step(p: Any, x: Any, ct: Any) -> Any:
        gradients = torch.func.grad(lambda p: (S0_SMALL.forward(p, x) * ct).sum())(p)
        return optimizer.update(gradients, optimizer.init(p), p)[0]

    args = place(params, mesh, P()), place(x, mesh, P("dp")), place(ct, mesh, P("dp"))
    (found,) = shard(step, mesh, out_specs=P()).lower(*args).collectives
    assert (found.kind, found.note) == ("all_reduce", "4 merged")


def collect(records: Any) -> str:
    return str(records)


def test_the_plan_prints_as_a_table() -> None:
    params, x, _ = S0_SMALL.normal(torch.float64)
    mesh = virtual(2)
    text = collect(
        shard(S0_SMALL.forward, mesh)
        .lower(*sharded_arguments(S0_SMALL, mesh, params, x))
        .collectives
    )
    header, rule, row, total = text.splitlines()
    assert header.split()[:4] == ["collective", "axes", "shape", "dtype"]
    assert set(rule) == {"-", " "}
    assert row.split()[:5] == ["all_reduce", "tp", "16×64", "float64", "8,192"]
    assert "seeds.py" in row
    assert total == "1 collective, 8,192 bytes per rank"


def test_work_stays_split_where_gathering_would_send_less() -> None:
    """A tiny hidden layer between wide ones: its shards are smaller than the result to reduce."""
    seed = dataclasses.replace(S0, sizes=(16, 8, 256), batch=(64,))
    params, x, _ = seed.normal(torch.float64)
    mesh = virtual(2)
    run = shard(seed.forward, mesh)
    assert kinds(run.lower(*sharded_arguments(seed, mesh, params, x)).collectives) == S0_FORWARD


def sgd(params: Any, slopes: Any) -> Any:
    return [p - 0.1 * g for p, g in zip(params, slopes, strict=True)]


def clipped(params: Any, slopes: Any) -> Any:
    norm = sum((g * g).sum() for g in slopes).sqrt()
    return [p - 0.1 * g / norm for p, g in zip(params, slopes, strict=True)]


def with_momentum(params: Any, slopes: Any) -> Any:
    kept = [0.9 * p + g for p, g in zip(params, slopes, strict=True)]
    return [p - 0.1 * k for p, k in zip(params, kept, strict=True)], kept


@pytest.mark.parametrize("update", [sgd, clipped, with_momentum])
def test_plain_arguments_plan_as_placed_ones(update: Callable[[Any, Any], Any]) -> None:
    """The updates come last, and what is reduced for them in one call, however the specs were given."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for up, bias, down in zip(*[iter(params)] * 3, strict=True):
            x = x + torch.tanh(x @ up + bias) @ down
        return (x * x).sum()

    def step(params: Any, x: torch.Tensor) -> Any:
        return update(params, torch.func.grad(loss)(params, x))

    mesh = Mesh({"dp": 2, "tp": 2}, virtual=True)
    specs = [P(None, "tp"), P("tp"), P("tp")] * 3
    params = [torch.randn(8, 8), torch.randn(8), torch.randn(8, 8)] * 3
    x = torch.randn(4, 8)
    plain = shard(step, mesh, in_specs=(specs, P("dp"))).lower(params, x)
    held = [place(p, mesh, s) for p, s in zip(params, specs, strict=True)]
    placed = shard(step, mesh).lower(held, place(x, mesh, P("dp")))
    assert kinds(plain.collectives) == kinds(placed.collectives)
    assert [c.bytes for c in plain.collectives] == [c.bytes for c in placed.collectives]
