"""A few entries of each list, with torch's functions alone; all: make alarms, detection, reach."""

from __future__ import annotations

import pytest
from correct import TORCH
from detection import BUGS, search
from false_alarms import run
from reach import laws, outcomes_of, reachable
from reach_functions import Reached


def test_no_fault_in_correct_functions() -> None:
    entries = [entry for entry in TORCH if entry.name in ("silu", "linear")]
    assert run(entries, draws=1).alarms == []


@pytest.mark.parametrize("name", ["Cube: factor", "causal_attention: mask hides the own"])
def test_a_planted_bug_is_found(name: str) -> None:
    (bug,) = [bug for bug in BUGS if bug.name == name]
    assert search(bug, examples=1).examples["equal"] == 1


def test_all_bugs_can_be_planted() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 120
    assert all(callable(bug.wrong()) for bug in BUGS)


def test_a_function_is_reached() -> None:
    found = outcomes_of(Reached("torch", "torch.nn.functional:silu", "b d"))
    assert list(found) == list(laws(abs, ())) and reachable(found)


def test_what_cannot_be_called_is_not_reached() -> None:
    assert not reachable(outcomes_of(Reached("torch", "torch.linalg:inv", "2 3")))
