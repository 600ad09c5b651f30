"""Peaks of programs on a mesh: what they say is what a rank is measured to have, to the byte."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from effort import examples


@pytest.mark.parametrize("rank", [0, 3])
def test_the_peak_of_a_rank_is_what_is_measured(tmp_path: Path, rank: int) -> None:
    """Of the first rank, which holds most; in a pipeline of the last one, too.

    Where the gradient is taken outside, the sum of the loss, of 4 bytes, is read as awaited at the end.
    """
    seeds = examples(ci=20, explore=500)
    found = forked.told("rank_peaks.py", rank, seeds, folder=tmp_path, seconds=240)
    assert len(found) > (seeds if rank == 0 else 1)
    for name, (said, measured) in found.items():
        assert said - measured in ((0, 4) if name.startswith("outside") else (0,)), name
