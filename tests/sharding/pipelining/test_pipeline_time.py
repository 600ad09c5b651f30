"""Predicted time of pipelines on machines of which it has a closed form."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import grad

from torchard import (
    Link,
    Machine,
    Mesh,
    P,
    PipelineError,
    jit,
    optim,
    pipeline,
    place,
    scope,
    shard,
)
from torchard.functional.remat.liveness import lists_of
from torchard.functional.reports.clock import timelines

NEVER = float("inf")
ROWS, K = 4, 8  # of a microbatch
PRODUCT = 2 * ROWS * K * K / 1e6
# A forward of a layer is one product, a backward two.
MACHINE = Machine("m", {"float32": 1e6}, NEVER)


def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(params):
        with scope(f"layer/{i}"):
            x = x @ w
    return x.square().sum()


def step(stages: int, count: int, schedule: str, **axes: int) -> tuple[Any, tuple[Any, ...]]:
    mesh = Mesh({"pp": stages, **axes}, virtual=True)
    each = {"microbatches": count, "batch": (None, 0), "schedule": schedule}
    run = pipeline(grad(loss, (0, 1)), mesh, "pp", stages="layer/*", **each)
    rows = count * ROWS * axes.get("dp", 1)
    return run, ([torch.ones(K, K)] * stages, torch.ones(rows, K))


def time_of(stages: int, count: int, schedule: str, machine: Machine = MACHINE, **axes: int) -> Any:
    run, args = step(stages, count, schedule, **axes)
    return run.lower(*args).time(machine)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 5), (3, 4), (4, 3)])
def test_an_infinitely_fast_network(schedule: str, stages: int, count: int) -> None:
    """m + s - 1 slots, each of a forward and a backward."""
    time = time_of(stages, count, schedule)
    assert time.seconds == pytest.approx((count + stages - 1) * 3 * PRODUCT)
    assert time.computing == pytest.approx(count * 3 * PRODUCT)
    assert time.bubble == pytest.approx((stages - 1) / count)
    assert len(time.timelines) == stages
    assert time.flops == pytest.approx(count * 3 * PRODUCT * 1e6)


def test_halves_of_backwards_fill_the_bubble() -> None:
    """Weight gradients are computed while ranks would wait: Qi et al., section 2.3.1."""
    slots = 5 + 3 - 1
    time = time_of(3, 5, "zb-h1")
    assert time.seconds < slots * 3 * PRODUCT
    assert time.seconds >= time.computing == pytest.approx(5 * 3 * PRODUCT)


def test_an_infinitely_fast_computer() -> None:
    """One microbatch passes all stages, and comes back."""
    machine = replace(MACHINE, flops={"float32": NEVER}, links={"pp": Link(NEVER, 1.0)})
    assert time_of(4, 1, "gpipe", machine).seconds == pytest.approx(2 * 3)


def test_latencies_are_on_the_way() -> None:
    machine = replace(MACHINE, links={"pp": Link(NEVER, PRODUCT / 2)})
    time = time_of(3, 1, "gpipe", machine)
    assert time.seconds == pytest.approx(3 * 3 * PRODUCT + 2 * 2 * PRODUCT / 2)


def test_a_slow_link_is_always_busy() -> None:
    """Each way, it carries all microbatches one after another."""
    machine = replace(MACHINE, flops={"float32": NEVER}, links={"pp": Link(ROWS * K * 4)})
    time = time_of(2, 4, "gpipe", machine)
    assert time.seconds == pytest.approx(2 * 4)
    assert {e.rank for e in time.exposed} == {0, 1}
    assert "bubble" in str(time) and "rank\n" in str(time)


def test_gradients_are_summed_along_another_axis() -> None:
    """The first stage sums its gradient last, while it computes that of its input."""
    machine = replace(MACHINE, links={"dp": Link(1e3)})
    mesh = Mesh({"pp": 2, "dp": 2}, virtual=True)
    each = {"microbatches": 3, "batch": (None, 0), "schedule": "gpipe"}
    params, x = [torch.ones(K, K)] * 2, torch.ones(3 * ROWS * 2, K)
    run = pipeline(grad(loss, (0, 1)), mesh, "pp", stages="layer/*", **each)
    placed = place(x, mesh, P("dp"))
    time = run.lower(params, placed).time(machine)
    summed = K * K * 4 / 1e3  # 2 (n - 1) / n of its bytes
    assert time.seconds == pytest.approx(((3 + 1) * 3 - 1) * PRODUCT + summed)


def test_ranks_that_share_processors() -> None:
    """While one rank waits, the other is twice as fast: of one microbatch one rank always waits."""
    machine = replace(MACHINE, alone=2.0)
    assert time_of(2, 1, "gpipe", machine).seconds == pytest.approx(2 * 3 * PRODUCT / 2)
    # The first and the last forward and backward of four slots are alone.
    assert time_of(2, 3, "gpipe", machine).seconds == pytest.approx(3 * 3 * PRODUCT)


def test_ranks_that_send_share_processors() -> None:
    """What ranks do to send is the faster, the fewer of them compute or send."""
    link = {"pp": Link(NEVER, 1.0)}
    machine = replace(MACHINE, flops={"float32": NEVER}, links=link, alone=2.0)
    assert time_of(4, 1, "gpipe", machine).seconds == pytest.approx(2 * 3)
    assert time_of(4, 1, "gpipe", replace(machine, hides=0.0)).seconds == pytest.approx(2 * 3 / 2)
    # Half of a latency is the processors', twice as fast; of two ranks, both take part.
    assert time_of(4, 1, "gpipe", replace(machine, hides=0.5)).seconds == pytest.approx(2 * 3 * 0.75)
    assert time_of(2, 1, "gpipe", replace(machine, hides=0.0)).seconds == pytest.approx(2)


def test_a_receiver_computes_until_it_is_sent_to() -> None:
    """Of three microbatches on a slow link, the second stage works on one while the next is sent."""
    machine = replace(MACHINE, links={"pp": Link(NEVER, PRODUCT)}, hides=0.0)
    time = time_of(2, 3, "gpipe", machine)
    assert time.computing == pytest.approx(3 * 3 * PRODUCT)
    for run in time.timelines:
        taken = sorted((each.begin, each.end) for each in run.intervals if not each.stream)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(taken))


def test_sending_may_take_the_processor() -> None:
    machine = replace(MACHINE, links={"pp": Link(NEVER, 1.0)}, overlaps=0.5)
    half = time_of(2, 1, "gpipe", machine)
    assert half.seconds == pytest.approx(2 + 2 * 3 * PRODUCT)
    assert half.computing == pytest.approx(3 * PRODUCT)


def test_ranks_that_wait_for_ever_are_named() -> None:
    lists = []
    for count in (3, 2):
        run, args = step(2, count, "gpipe")
        lists.append(lists_of(run.lower(*args))[len(lists)])
    with pytest.raises(PipelineError, match=r"never issue: rank 0 for send\(pp\).*of B2 of chunk 1"):
        timelines(lists, MACHINE, [lambda node: 0.0] * 2)


def test_a_step_with_an_optimizer_and_values_of_all_stages() -> None:
    """A sum over stages, such as that of a norm of gradients, is one transfer of all."""
    opt = optim.adamw(1e-3)

    def train(params: Any, state: Any, x: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, x)
        norm = sum(g.square().sum() for g in grads).sqrt()
        grads = [g / norm for g in grads]
        return *opt.update(grads, state, params), value

    mesh = Mesh({"pp": 2}, virtual=True)
    params = [torch.ones(K, K)] * 2
    each = {"microbatches": 2, "batch": (None, None, 0)}
    run = pipeline(train, mesh, "pp", stages="layer/*", **each)
    plan = run.lower(params, opt.init(params), torch.ones(8, K))
    machine = replace(MACHINE, links={"pp": Link(NEVER, 1.0)})
    assert plan.time(MACHINE).seconds < 1 < plan.time(machine).seconds


def test_loops_and_compilers_of_stages() -> None:
    run, args = step(2, 2, "1f1b")
    compiled = jit(run, backend="eager").lower(*args).time(MACHINE)
    assert compiled.seconds == pytest.approx(run.lower(*args).time(MACHINE).seconds)
    plain = shard(grad(loss), Mesh({"a": 1}, virtual=True), (P(), P()))
    assert len(plain.lower(*args).time(MACHINE).timelines) == 1
