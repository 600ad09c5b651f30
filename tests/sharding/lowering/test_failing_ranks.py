"""One rank fails before it has a plan, or has another one: all raise within seconds, and may go on."""

from __future__ import annotations

import re
from typing import Any

import forked
import pytest
from once import once

Found = list[dict[str, tuple[float, str]]]
PATIENCE = 60
SECONDS = 10.0  # of a call; the group waits for ten minutes
FAILING = [
    *("shard", "late", "grad", "inside", "jit", "nested", "pipeline", "shard_map", "joint axes"),
    *("loop", "others place", "others have a plan"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = once(
        tmp_path_factory,
        "failing-ranks",
        lambda folder: forked.told("failing_ranks.py", folder, folder=folder, seconds=PATIENCE),
    )
    return found


def each(ranks: Found, name: str) -> list[str]:
    """What the ranks say of a call."""
    assert max(found[name][0] for found in ranks if name in found) < SECONDS
    return [found[name][1] for found in ranks if name in found]


@pytest.mark.parametrize("name", FAILING)
def test_one_rank_fails(ranks: Found, name: str) -> None:
    first, odd, *others = each(ranks, name)
    assert odd == "ValueError: no such token"
    for said in (first, *others):
        assert said.startswith("RankFailed: rank 1 raised ValueError: no such token"), said
        assert re.search(r"\(failing_ranks.py:\d+ in fails\), while rank [023] waited for", said)


@pytest.mark.parametrize(
    "name",
    ["compiler", "late compiler", "compiler of a forward", "compiler of a backward"],
)
def test_the_compiler_of_one_rank_fails(ranks: Found, name: str) -> None:
    first, odd, *others = each(ranks, name)
    assert odd.startswith("ValueError: no such token")
    for said in (first, *others):
        assert said.startswith("RankFailed: rank 1 raised ValueError: no such token"), said


def test_a_call_that_a_compiler_failed_may_be_made_again(ranks: Found) -> None:
    assert each(ranks, "compiled again") == ["no error"] * 4


@pytest.mark.parametrize(
    ("name", "error"),
    [("eager", "RuntimeError: shape '[3, 3]' is invalid"), ("a spec", "SpecError: out_specs")],
)
def test_one_rank_is_refused(ranks: Found, name: str, error: str) -> None:
    first, odd, *others = each(ranks, name)
    assert odd.startswith(error)
    for said in (first, *others):
        assert said.startswith(f"RankFailed: rank 1 raised {error}"), said


@pytest.mark.parametrize(
    "name",
    ["only one communicates", "only one is new", "only one is not new", "another plan"],
)
def test_one_rank_has_another_plan(ranks: Found, name: str) -> None:
    for said in each(ranks, name):
        assert said.startswith("PlanMismatch: rank"), said


def test_all_ranks_fail(ranks: Found) -> None:
    assert all(said.startswith("RuntimeError: shape '[3, 3]'") for said in each(ranks, "all"))


def test_an_error_ends_a_rank(ranks: Found) -> None:
    for said in each(ranks, "ended"):
        assert said.startswith("RankFailed: rank 1 has ended with SpecError: not this one."), said


def test_ranks_differ_in_nothing_else(ranks: Found) -> None:
    names: Any = {frozenset(found) - {"ended"} for found in ranks}
    assert len(names) == 1
