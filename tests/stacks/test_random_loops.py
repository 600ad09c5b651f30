"""Every random loop under random transforms and derivations is right, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from loop_calls import CALLS, poisoned_buffer
from random_loops import random_layers, random_loop
from random_stacks import FAILED, WRONG, Case, draw, judge

from torchard.functional.iterations import collecting
from torchard.functional.loops import equal_layers

COUNT = examples(ci=4, explore=5000)
FIRST = 2_000_000


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, 8))
@pytest.mark.parametrize("source", [random_loop, random_layers])
def test_a_random_loop_is_right_or_refused_by_name(
    first: int, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 cases; `python tests/support/random_loops.py 1 SEED` runs one of each alone."""
    monkeypatch.setattr(equal_layers, "MIN_SAVED", 1)  # small programs are rolled, too
    monkeypatch.setattr(collecting, "new_buffer", poisoned_buffer)
    found = []
    for seed in range(first, min(first + 8, FIRST + COUNT)):
        verdict = judge(_called(draw(seed, [source]), seed))
        if verdict.kind in (WRONG, FAILED):
            found.append(f"{draw(seed, [source])}: {verdict.kind}, {verdict.why}")
    assert not found, "\n".join(found)


def _called(case: Case, seed: int) -> Case:
    """The case, called as users call: with leaves that require grad, without gradients, twice."""
    ways = [name for name in CALLS if name != "inference mode"]  # torch.func has none in it
    name = ways[seed % len(ways)]
    return replace(case, layers=(*case.layers, (name, CALLS[name])))
