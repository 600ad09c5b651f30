"""Plans called in orders that differ from rank to rank: right results, or one message on every rank."""

from __future__ import annotations

from typing import Any

import call_orders
import forked
import pytest
from effort import examples
from once import once

Results = list[dict[str, Any]]
PATIENCE = 240


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What became of the calls of every rank."""
    world, rounds = request.param, examples(ci=20, explore=600)
    found: Results = once(
        tmp_path_factory,
        f"call-order-{world}",
        lambda folder: forked.told(
            "call_orders.py", world, folder, rounds, folder=folder, seconds=PATIENCE
        ),
    )
    return found


def test_calls_in_one_order_are_right(ranks: Results) -> None:
    for found in ranks:
        assert {*found["alone"]} == {"right"}, found["alone"]


def test_calls_in_different_orders_are_told_on_every_rank(ranks: Results) -> None:
    """The n-th call of each rank meets the n-th of the others: they are the same, or nothing is sent."""
    calls = list(zip(*(found["calls"] for found in ranks), strict=True))
    assert len(calls) >= 20 * call_orders.CALLS
    same = 0
    for each in calls:
        names, outcomes = zip(*each, strict=True)
        same += len({*names}) == 1
        want = "right" if len({*names}) == 1 else "PlanMismatch"
        assert {*outcomes} == {want}, each
    assert len(calls) / 8 < same < len(calls) * 7 / 8  # or little was tested


def test_ranks_of_one_host_meet_without_gloo(ranks: Results) -> None:
    for found in ranks:
        assert found["linked"] and all(found["linked"])


def test_a_call_that_a_rank_gives_up_meets_no_later_one(ranks: Results) -> None:
    """By an interrupt, or when it has waited in vain; the others' messages for it come later."""
    first, *others = (found["left"] for found in ranks)
    lost = ["CollectiveError"] * 2
    assert first == [["right", how, *lost] for how in ("KeyboardInterrupt", "CollectiveError")]
    assert others == [[["right", *lost]] * 2] * len(others)


def test_a_rank_that_loses_others_in_their_call_is_told_so(ranks: Results) -> None:
    """Or of its own error, if it has one."""
    first, *others = (found["lost"] for found in ranks)
    assert first[0].startswith("CollectiveError: ranks 0, 1") and "lost the others: Timed out" in first[0]
    assert first[1] == "ValueError: no such token"
    assert not {"right", "wrong"} & {each for found in others for each in found}


def test_ranks_may_go_on_as_soon_as_they_know_of_a_new_plan(ranks: Results) -> None:
    """Who tells them no longer waits for them then, or they would meet what it waits with."""
    first, *others = (found["onwards"] for found in ranks)
    assert first == ["right", "PlanMismatch", "right", [False]]
    assert others == [["right", "PlanMismatch", "right", []]] * len(others)


def test_beside_another_backend(ranks: Results) -> None:
    want = ["right", "right", "PlanMismatch", "right"]
    assert [found["beside"] for found in ranks] == [want] * len(ranks)


def test_threads_get_right_results_or_a_message(ranks: Results) -> None:
    for found in ranks:
        assert {*found["threads"]} <= {"right", "PlanMismatch"}, {*found["threads"]}
    assert len({found["threads"].count("right") for found in ranks}) == 1
