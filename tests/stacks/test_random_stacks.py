"""Every random stack of transforms and derivations is right, or refused by name."""

from __future__ import annotations

import pytest
from effort import examples
from random_stacks import FAILED, WRONG, draw, judge

COUNT = examples(ci=25, explore=5000)
# Not those of the script's usual ranges.
FIRST = 1_000_000


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks, deprecated operations
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, 64))
def test_a_random_stack_is_right_or_refused_by_name(first: int) -> None:
    """64 cases; `python tests/support/random_stacks.py 1 --first SEED --verbose` runs one alone."""
    found = []
    for seed in range(first, min(first + 64, FIRST + COUNT)):
        verdict = judge(draw(seed))
        if verdict.kind in (WRONG, FAILED):
            found.append(f"{draw(seed)}: {verdict.kind}, {verdict.why}")
    assert not found, "\n".join(found)
