"""Published bugs, put back in by hand: found by `equal`, and led to their line by `localize`."""

from __future__ import annotations

import re

import pytest
from published_bugs import BUGS, Bug

from torchard.testing import Divergence, equal, localize

BY_NAME = [pytest.param(bug, id=bug.name) for bug in BUGS]


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 12 and len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BY_NAME)
def test_equal_finds_it(bug: Bug) -> None:
    with pytest.raises(AssertionError, match="differs from its reference"):
        equal(bug.wrong, bug.right, *bug.args, orders=["value", "gradient"])


def _lines(divergence: Divergence) -> set[int]:
    operations = (*divergence.fn, *divergence.reference)
    return {
        int(m[1]) for o in operations if (m := re.search(r"published_bugs\.py:(\d+)", o.source))
    }


@pytest.mark.parametrize("bug", BY_NAME)
def test_localize_leads_to_its_line(bug: Bug) -> None:
    divergence = localize(bug.wrong, bug.right, *bug.args)
    if divergence.agree:
        divergence = localize(bug.wrong, bug.right, *bug.args, gradients=True)
    assert not divergence.agree and bug.lines & _lines(divergence), str(divergence)
