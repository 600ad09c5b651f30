"""When a plan that is found by minimizing replaces the one that it began with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Link, Machine, Mesh, P, ShapeDtype, random, repeat, shard
from torchard.sharding.planning.minimum.reshards import Calls, Reshards
from torchard.sharding.scheduling.improved import Figures
from torchard.sharding.values.spec import layout_of

DP, TP = Mesh({"dp": 4}, virtual=True), Mesh({"tp": 4}, virtual=True)


@pytest.mark.parametrize(
    ("found", "better"),
    [
        (Figures(0.5, 10, 1.0), True),
        (Figures(1.0, 10, 0.5), True),
        (Figures(0.5, 11, 1.0), True),
        (Figures(0.5, 18_000, 1.0), False),  # latencies
        (Figures(0.5, 10, 2.0), False),  # on a slow computer
        (Figures(1.5, 10, 0.95), False),  # on a slow network
        (Figures(0.95, 10, 0.95), False),  # nearly equal
        (Figures(1.0, 10, 1.0), False),
    ],
)
def test_better_on_every_machine(found: Figures, better: bool) -> None:
    assert found.dominates(Figures(1.0, 10, 1.0)) is better


@pytest.mark.parametrize("reads", [False, True])
def test_an_axis_that_splits_what_nothing_reads_splits_the_work(reads: bool) -> None:
    """Noise has the batch's shape, of which a plain argument tells nothing else."""

    def fn(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
        noise = random.normal(key, x.shape, x.dtype)
        return torch.tanh((noise + x if reads else noise) @ w).square().sum()

    args = ShapeDtype((64, 64)), ShapeDtype((4096, 64)), random.key(0)
    plan = shard(torch.func.grad(fn), DP, (P(), P("dp"), P()), P()).lower(*args)
    assert plan.work.rank_flops < plan.work.flops / 3.5
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


def test_a_reshard_takes_its_bytes_and_a_latency_in_each_iteration() -> None:
    machine = Machine("m", {"float32": 1.0}, 1.0, links={"tp": Link(1000.0, 7.0)})
    rows, whole = layout_of(P("tp"), (8, 5), TP), layout_of(P(), (8, 5), TP)
    reshards = Reshards(TP.sizes, machine)
    gather = 8 * 5 * 3 / 4 * 2 / 1000
    merged_moves, merged_sums = Calls(moves=0.1), Calls(sums=0.1)
    assert reshards.seconds(rows, whole, 2, 3, Calls()) == pytest.approx(3 * (gather + 7))
    assert reshards.seconds(rows, whole, 2, 3, merged_moves) == pytest.approx(3 * (gather + 0.7))
    assert reshards.seconds(rows, whole, 2, 3, merged_sums) == pytest.approx(3 * (gather + 7))
    assert reshards.seconds(whole, rows, 2, 3, Calls()) == pytest.approx(0)


def sent(run: Any, *args: Any) -> list[tuple[str, int]]:
    return [(c.kind, c.bytes * c.times) for c in run.lower(*args).collectives]


def test_a_carry_that_begins_as_zeros_has_the_layout_of_its_body() -> None:
    def states(w: Tensor, xs: Tensor) -> Any:
        def step(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x + h @ w)
            return h, h

        zero = torch.zeros(xs.shape[1:], dtype=xs.dtype)
        return repeat(step, xs, zero, w, collect=True)[1]

    run = shard(states, DP, in_specs=(P(), P(None, "dp")), out_specs=P(None, "dp"))
    w, xs = torch.randn(8, 8, dtype=torch.float64), torch.randn(5, 12, 8, dtype=torch.float64)
    assert sent(run, w, xs) == []
    torch.testing.assert_close(run(w, xs).full(), states(w, xs))


def test_a_sum_is_put_off_behind_linear_operations_where_it_is_smaller() -> None:
    """The gradient of an adapter, not that of the weight that it is merged with."""

    def gradients(adapter: tuple[Tensor, Tensor], w: Tensor, x: Tensor) -> Any:
        def loss(adapter: tuple[Tensor, Tensor]) -> Tensor:
            a, b = adapter
            return (x @ (w + a @ b)).square().sum()

        return torch.func.grad(loss)(adapter)

    run = shard(gradients, DP, in_specs=((P(), P()), P(), P("dp")), out_specs=(P(), P()))
    adapter = ShapeDtype((64, 2)), ShapeDtype((2, 64))
    ((kind, size),) = sent(run, adapter, ShapeDtype((64, 64)), ShapeDtype((32, 64)))
    assert (kind, size) == ("all_reduce", 2 * 3 * (64 * 2 * 2 * 4) // 4)


def test_parameters_stay_where_products_are_split_by_them() -> None:
    """Tensor parallelism, though to gather all weights at once, and split rows, would send less."""

    def blocks(params: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        for up, down in params:
            x = torch.relu(x @ up) @ down
        return x.square().sum()

    specs = [(P(None, "tp"), P("tp"))] * 3
    run = shard(torch.func.grad(blocks), TP, in_specs=(specs, P()), out_specs=specs)
    weights = [(ShapeDtype((64, 128)), ShapeDtype((128, 64)))] * 3
    each = ("all_reduce", 2 * 3 * (4096 * 64 * 4) // 4)
    assert sent(run, weights, ShapeDtype((4096, 64))) == [each] * 5


def test_full_sharding_gathers_parameters() -> None:
    """Though to gather such a small batch would send less, by one collective."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum()

    columns = P(None, "dp")
    run = shard(torch.func.grad(loss), DP, in_specs=(columns, P("dp")), out_specs=columns)
    kinds = {kind for kind, _ in sent(run, ShapeDtype((512, 512)), ShapeDtype((8, 512)))}
    assert kinds == {"all_gather", "psum_scatter"}
