"""Gradients are merged so that a step ends first on a machine, and small sums of inputs come first."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from torchard import Link, Machine, Mesh, P, Schedule, ShapeDtype, machines, place, shard
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import COLLECTIVE
from torchard.sharding import shard_rewrite
from torchard.sharding.scheduling.schedule import count_first

LAYERS, WIDTH = 8, 1024
PARAMS = [ShapeDtype((WIDTH, WIDTH))] * LAYERS
ROWS = ShapeDtype((256, WIDTH))


def machine(link: Link, overlaps: float = 1.0, hides: float = 1.0) -> Machine:
    return Machine("m", {"float32": 1e12}, 1e12, link=link, overlaps=overlaps, hides=hides)


def by_default(on: Machine) -> Any:
    """With ``machine=`` the plan would be another one as well: one that sends activations."""
    return mock.patch.object(shard_rewrite, "default", lambda device: on)


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().sum()


def calls(on: Machine, schedule: Schedule | None = None) -> list[int]:
    """The bytes of each call for gradients, by data parallelism."""
    mesh, split = Mesh({"dp": 2}, virtual=True), (P(), P("dp"))
    with by_default(on):
        step = shard(torch.func.grad(loss), mesh, in_specs=split, out_specs=P(), schedule=schedule)
    return [c.bytes for c in step.lower(PARAMS, ROWS).collectives]


WHOLE = 4 * LAYERS * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("link", "overlaps", "hides", "fewest", "most"),
    [
        (Link(float("inf")), 1.0, 1.0, 2, 2),  # nothing is gained by sending early
        (Link(1e12, latency=1.0), 1.0, 1.0, 2, 2),  # each call costs more than all that is computed
        (Link(1e10), 0.0, 1.0, 2, 2),  # ranks that send compute nothing
        (Link(1e11), 1.0, 1.0, 4, LAYERS),  # all but the last are sent while the rest is computed
        (Link(1e11), 0.5, 1.0, 4, LAYERS),  # so is half of them
        (Link(1e11, latency=1e-4), 1.0, 1.0, 4, LAYERS),
        (Link(1e11, latency=1e-4), 1.0, 0.0, 2, 2),  # each call stops the rank for a latency
    ],
    ids=["fast", "far", "busy", "slow", "half", "hidden", "stops"],
)
def test_buckets_are_those_with_which_the_step_ends_first(
    link: Link, overlaps: float, hides: float, fewest: int, most: int
) -> None:
    """Buckets of at most 25 MiB, for memory: two at least."""
    sent = calls(machine(link, overlaps, hides))
    assert sum(sent) == WHOLE
    assert fewest <= len(sent) <= most


def test_a_loss_travels_with_the_gradients() -> None:
    """Of a joint program the loss is in the forward, and gradients in the backward."""
    mesh, w, x = Mesh({"dp": 2}, virtual=True), torch.ones(4, 4), torch.ones(8, 4)
    split = (P(), P("dp"))
    step = shard(torch.func.grad_and_value(loss), mesh, in_specs=split, out_specs=P()).lower([w, w], x)
    (sent,) = step.collectives
    assert (sent.shape, sent.phase, sent.note) == ((2 * 16 + 1,), "backward", "3 merged")
    (waited,) = step.time(machines.cpu()).exposed
    assert waited.source == sent.source, "both name the line of the gradients"
    joint = shard(loss, mesh, in_specs=split).lower_joint([w, w], x, argnums=0)
    assert [(c.shape, c.phase) for c in joint.collectives] == [((), "forward"), ((32,), "backward")]


@pytest.mark.parametrize(("latency", "sent"), [(1e-3, [WIDTH * WIDTH + 1]), (1e-6, [1, WIDTH * WIDTH])])
def test_a_loss_does_not_cost_the_copy_of_a_value(latency: float, sent: list[int]) -> None:
    """A single gradient is sent from where it lies, unless a latency takes longer than to copy it."""
    mesh, split = Mesh({"dp": 2}, virtual=True), (P(), P("dp"))
    on = machine(Link(1e11, latency), overlaps=0.0)
    with by_default(on):
        step = shard(torch.func.grad_and_value(loss), mesh, in_specs=split, out_specs=P())
    lowered = step.lower(PARAMS[:1], ROWS)
    assert [math.prod(c.shape) for c in lowered.collectives] == sent


def test_the_user_s_size_comes_first() -> None:
    one = 4 * WIDTH * WIDTH
    assert calls(machine(Link(1e12, latency=1.0)), Schedule(bucket_bytes=one)) == [one] * LAYERS


def test_the_count_of_targets_is_reduced_before_anything_is_computed() -> None:
    mesh = Mesh({"dp": 2}, virtual=True)

    def mean(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.tanh(x @ w) @ w, y)

    batch = place((torch.randn(8, 6), torch.tensor([0, 1, 2, -100, 4, 5, -100, 0])), mesh, P("dp"))
    weights = torch.randn(6, 6)
    step = shard(torch.func.grad_and_value(mean), mesh, out_specs=P())
    names = order(step.lower(weights, *batch))
    assert names.index("all_reduce") < names.index("mm")
    plain = torch.func.grad_and_value(mean)(weights, *(value.full() for value in batch))
    torch.testing.assert_close(step(weights, *batch), plain)


def test_counts_of_a_batch_that_each_rank_takes_its_part_of() -> None:
    """To take a part of a plain argument sends nothing."""
    step = shard(
        lambda w, x: (torch.tanh(x @ w).sum(), (x > 0).sum()),
        Mesh({"dp": 2}, virtual=True),
        in_specs=(P(), P("dp")),
        out_specs=P(),
    )
    names = order(step.lower(torch.randn(3, 3), torch.randn(8, 3)))
    assert names.index("all_reduce") < names.index("mm")


def test_counts_that_share_values() -> None:
    """Both are reduced first, and what both read is computed before either."""
    mesh, w = Mesh({"dp": 2}, virtual=True), torch.randn(3, 3)
    x = place(torch.randn(8, 3), mesh, P("dp"))

    def counts(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        known = x.sin()
        first = known.sum()
        second = known.cos().sum().sqrt()
        return (x @ w).square() + first, second

    step = shard(counts, mesh, out_specs=P())
    names = order(step.lower(w, x))
    assert names.index("mm") > max(i for i, name in enumerate(names) if name == "all_reduce")
    torch.testing.assert_close(step(w, x), counts(w, x.full()))
    graph = step.lower(w, x).graph
    count_first(graph)
    graph.lint()


def test_programs_without_inputs() -> None:
    step = shard(lambda: torch.ones(4).sum(), Mesh({"dp": 2}, virtual=True), out_specs=P())
    assert step() == 4


def order(program: Program) -> list[Any]:
    return [COLLECTIVE.of(n).kind if COLLECTIVE.on(n) else n.name.split("_")[0] for n in program.calls]
