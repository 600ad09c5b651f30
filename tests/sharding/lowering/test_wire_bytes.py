"""What the known recipes of transformer layers send is no more than what DTensor's send.

Bytes of both are counted by one formula from the tensors that CommDebugMode sees handed to collectives,
padding included, forward and backward of two layers; gradients end as their parameters are laid out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
from once import once
from torch_version import TORCH
from wire_bytes import BATCH, LAYERS, LENGTH, WIDTH

Case = tuple[str, int, str]
FLOAT = 4
TIMEOUT = 240

CASES: list[Case] = [
    ("tensor parallel", 2, "layer"),
    ("tensor parallel", 4, "layer"),
    ("tensor parallel", 3, "mlp"),
    ("sequence parallel", 2, "layer"),
    ("sequence parallel", 4, "layer"),
    ("sequence parallel", 3, "mlp"),  # 16 positions as 6, 6, 4, padded to 18
    ("fully sharded", 4, "layer"),
    ("fully sharded", 5, "layer"),  # 48 rows as 10, 10, 10, 10, 8, padded to 50
    ("data parallel", 4, "layer"),
]
# What DTensor can not split, and says: 4 heads over 3 ranks, 192 hidden units over 5.
REFUSED: dict[Case, str] = {
    ("tensor parallel", 3, "layer"): "unflatten: Provided sizes [-1, 12] don't multiply up",
    ("tensor parallel", 5, "mlp"): "a and b must have same reduction dim, but got [192, 195]",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What each case sent, and DTensor."""
    sent = once(tmp_path_factory, "wire-bytes", all_cases)
    return dict(zip([*CASES, *REFUSED], sent, strict=True))


def all_cases(folder: Path) -> list[dict[str, Any]]:
    """In one process of its own, whose default group is not ours."""
    cases = (",".join(map(str, case)) for case in [*CASES, *REFUSED])
    found: list[dict[str, Any]] = forked.told(
        "wire_bytes.py", *cases, folder=folder, seconds=TIMEOUT
    )
    return found


def all_reduced(ranks: int, elements: int) -> int:
    """Bytes a rank sends (Patarasuk & Yuan 2009)."""
    return -(-2 * (ranks - 1) * elements * FLOAT // ranks)


def biases_alone(case: Case) -> int:
    """Gradients of row biases under sequence parallelism, which are summed over a rank's positions.

    Megatron's code sends them, too, with those of the norms. DTensor sums them over the gathered
    cotangent, on every rank all of it: nothing to send, and as many times the work.
    """
    name, ranks, part = case
    count = 2 if part == "layer" else 1
    return all_reduced(ranks, count * WIDTH * LAYERS) if name == "sequence parallel" else 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sends_no_more_than_dtensor(case: Case, found: dict[Case, dict[str, Any]]) -> None:
    have = found[case]
    if TORCH < (2, 12) and "theirs" not in have:
        pytest.skip("DTensor of torch 2.11 fails on a view of uneven shards")
    assert "theirs" in have, have
    ours, theirs = (
        {phase: sum(kinds.values()) for phase, kinds in have[who].items()} for who in ("ours", "theirs")
    )
    assert ours["forward"] <= theirs["forward"], have
    assert ours["backward"] <= theirs["backward"] + biases_alone(case), have


@pytest.mark.parametrize("case", [*CASES, *REFUSED], ids=str)
def test_sends_what_the_plan_says(case: Case, found: dict[Case, dict[str, Any]]) -> None:
    have = found[case]
    sent = sum(size for kinds in have["ours"].values() for size in kinds.values())
    assert 0 < sent == have["planned"], have


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_dtensor_refuses(case: Case, found: dict[Case, dict[str, Any]]) -> None:
    """Ours sends what it does for shards of one size: the stream, reduced, twice a layer and pass."""
    _, ranks, part = case
    per_pass = (2 if part == "layer" else 1) * LAYERS
    reduced = per_pass * all_reduced(ranks, BATCH * LENGTH * WIDTH)
    have = found[case]
    assert REFUSED[case] in have["refused"]
    for phase in "forward", "backward":
        assert have["ours"][phase] == {"all_reduce": pytest.approx(reduced, abs=per_pass)}, have
