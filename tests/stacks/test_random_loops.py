"""Every random loop under random transforms and derivations is right, or refused by name."""

from __future__ import annotations

import pytest
from effort import examples
from random_loops import random_loop
from random_stacks import FAILED, WRONG, draw, judge

COUNT = examples(ci=16, explore=5000)
FIRST = 2_000_000


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, 8))
def test_a_random_loop_is_right_or_refused_by_name(first: int) -> None:
    """8 cases; `python tests/support/random_loops.py 1 SEED` runs one alone."""
    found = []
    for seed in range(first, min(first + 8, FIRST + COUNT)):
        verdict = judge(draw(seed, [random_loop]))
        if verdict.kind in (WRONG, FAILED):
            found.append(f"{draw(seed, [random_loop])}: {verdict.kind}, {verdict.why}")
    assert not found, "\n".join(found)
