"""Every random program of loops and branches under random transforms is right, or refused by name."""

from __future__ import annotations

import pytest
from effort import examples
from random_control import random_control
from random_stacks import FAILED, WRONG, draw, judge

COUNT = examples(ci=4, explore=5000)
FIRST = 1_000


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, 8))
def test_a_random_program_is_right_or_refused_by_name(first: int) -> None:
    """8 cases; `python tests/support/random_control.py 1 SEED` runs one of them."""
    found = []
    for seed in range(first, min(first + 8, FIRST + COUNT)):
        verdict = judge(draw(seed, [random_control]))
        if verdict.kind in (WRONG, FAILED):
            found.append(f"{draw(seed, [random_control])}: {verdict.kind}, {verdict.why}")
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed",
    [
        # A jvp, and a vmap of it, of a loop that ends by a value within a loop.
        1190,
        # Values that leave a conditional have the strides of the branch that has run.
        1206,
    ],
)
def test_what_was_wrong_once(seed: int) -> None:
    case = draw(seed, [random_control])
    verdict = judge(case)
    assert verdict.kind not in (WRONG, FAILED), f"{case}: {verdict.why}"
