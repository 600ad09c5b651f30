"""Peaks of programs with loops: what they say is what is measured from outside, to the byte."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from _live import LiveBytes
from effort import examples
from live_bytes import OneRank
from random_loops import random_program

from torchard.functional.execution.binding import bind
from torchard.functional.loops import equal_layers as limits
from torchard.functional.programs.unrolled import has_loops
from torchard.functional.remat.liveness import peak_of
from torchard.functional.reports.memory import memory_of

COUNT = examples(ci=40, explore=5000)


@pytest.fixture(autouse=True)
def few_operations_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are rolled, too."""
    monkeypatch.setattr(limits, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(limits, "MIN_SAVED", 1)


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(0, COUNT, 10))
def test_the_peak_of_a_random_loop_is_what_is_measured(first: int) -> None:
    found = 0
    for seed in range(first, first + 10):
        program, args = random_program(seed)
        if not has_loops(program):
            continue
        found += 1
        run = bind(program)
        run(args)
        gc.collect()
        with LiveBytes(args) as count:
            run(args)
        assert memory_of(program).peak == peak_of(program) == count.peak(), seed
        assert peak_of(replace(program, runtime=OneRank())) == count.peak(), seed
    assert found > 3
