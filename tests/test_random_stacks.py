"""Random functions × derivations × stacks of transforms: right, or refused by name."""

from __future__ import annotations

import pytest
from effort import examples
from random_stacks import FAILED, WRONG, draw, judge


@pytest.mark.parametrize("part", range(4))
def test_a_random_stack_is_right_or_refused_by_name(part: int) -> None:
    count = examples(3, 500)
    first = 13 + count * part
    bad = []
    for seed in range(first, first + count):
        case = draw(seed)
        verdict = judge(case)
        if verdict.kind in (WRONG, FAILED):
            bad.append(f"{verdict.kind}: {case}\n    {verdict.why}")
    assert not bad, "\n".join(bad)
