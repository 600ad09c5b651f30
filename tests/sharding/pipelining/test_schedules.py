"""Schedules: bubbles and what is in flight are the papers'; a list that cannot be run is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchard import PipelineError, PipelineSchedule, Task
from torchard.sharding.pipelining.schedules import SCHEDULES, check, named, needs, timeline

COST = {"F": 1, "B": 2, "I": 1, "W": 1}


def bubble(name: str, ranks: int, microbatches: int) -> Fraction:
    run = timeline(named(name, ranks, microbatches), lambda task: COST[task.kind])
    return Fraction(int(run.length), int(max(run.busy))) - 1


# By ranks p and microbatches m, where p divides m, and there are enough of them to be in flight.
BUBBLES: dict[str, Callable[[int, int], Fraction]] = {
    "gpipe": lambda p, m: Fraction(p - 1, m),
    "1f1b": lambda p, m: Fraction(p - 1, m),
    "interleaved": lambda p, m: Fraction(p - 1, 2 * m),
    "zb-h1": lambda p, m: Fraction(p - 1, 3 * m),
    "zb-v": lambda p, m: Fraction(p - 1, 6 * m),
}
IN_FLIGHT: dict[str, Callable[[int, int], list[int]]] = {
    "gpipe": lambda p, m: [m] * p,
    "1f1b": lambda p, m: [p - rank for rank in range(p)],
    "zb-h1": lambda p, m: [p] * p,
    "zb-v": lambda p, m: [2 * p] * p,
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_what_is_in_flight(name: str, ranks: int) -> None:
    for microbatches in (2 * ranks, 4 * ranks, 8 * ranks):
        assert bubble(name, ranks, microbatches) == BUBBLES[name](ranks, microbatches)
        if name in IN_FLIGHT:
            run = timeline(named(name, ranks, microbatches))
            assert list(run.in_flight) == IN_FLIGHT[name](ranks, microbatches)


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 20))
def test_every_size_can_be_run(name: str, ranks: int, microbatches: int) -> None:
    """Each task starts once what it needs has ended, and ranks do one at a time, in order."""
    schedule = check(named(name, ranks, microbatches))
    run = timeline(schedule)
    assert schedule.microbatches == microbatches
    for tasks in schedule.ranks:
        for before, after in itertools.pairwise(tasks):
            assert run.ends[before] <= run.starts[after]
    for task in run.starts:
        assert all(run.ends[other] <= run.starts[task] for other in needs(task, schedule.chunks))


def test_a_schedule_of_ones_own() -> None:
    """Microbatches one after another: no overlap at all."""
    tasks = [[Task(c, m, k) for m in range(3) for k in "FB"] for c in range(2)]
    run = timeline(PipelineSchedule(tuple(map(tuple, tasks)), "serial"), lambda task: COST[task.kind])
    assert (run.length, run.in_flight) == (18, (1, 1))


def lists(*ranks: str) -> PipelineSchedule:
    """A schedule from texts: ``F0.1`` is the forward of chunk 0 for microbatch 1."""
    return PipelineSchedule(
        tuple(
            tuple(Task(int(word[1]), int(word[3]), word[0]) for word in rank.split()) for rank in ranks
        )
    )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lists("F0.0 F0.0 B0.0", "F1.0 B1.0"), "F0 of chunk 0 occurs twice"),
        (lists("F0.0", "F1.0 B1.0"), "B0 of chunk 0 is missing on rank 0"),
        (lists("F0.0 X0.0", "F1.0"), "X0 of chunk 0 is not one of F"),
        (lists("F0.0 F1.0 B0.0", "F1.1 B1.0"), "chunk 1 is on ranks 0 and 1"),
        (lists("F0.0 B0.0", "F2.0 B2.0"), "no rank computes chunk 1"),
        (
            lists("B0.0 F0.0", "F1.0 B1.0"),
            "rank 0 waits with B0 of chunk 0 for F0 of chunk 0; rank 1 waits with F0 of chunk 1 for F0",
        ),
    ],
)
def test_what_cannot_be_run(schedule: PipelineSchedule, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        check(schedule)
