"""The reader of XLA's programs: kinds, groups in each of XLA's notations, and bytes."""

from __future__ import annotations

import pytest
from hlo import Sent, collectives

LINES = {
    "%a = f32[4,16]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add": Sent(
        "all_reduce", 2 * 256 * 3 / 4
    ),
    "%a = (f32[], bf16[8]{0}) all-reduce(%x, %y), replica_groups=[4,2]<=[8], to_apply=%add": Sent(
        "all_reduce", 2 * 20 / 2
    ),
    "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}": Sent(
        "all_gather", 32 * 3 / 4
    ),
    "%a = f32[8]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": (
        Sent("all_gather", 32 * 3 / 4)
    ),
    "%a = s32[2]{0} reduce-scatter(%x), replica_groups={{0,1}}, dimensions={0}": Sent(
        "psum_scatter", 8
    ),
    "%a = f32[2,8]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}": Sent(
        "ppermute", 64
    ),
    "%a = (f32[1,2]{1,0}, f32[1,2]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}}": Sent(
        "all_to_all", 8
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_collective(line: str) -> None:
    assert collectives(line, 8) == [LINES[line]]


def test_what_sends_nothing_is_left_out() -> None:
    text = "%a = f32[4]{0} add(%x, %all-reduce)\n%b = f32[4]{0} all-reduce(%x), replica_groups={{0},{1}}"
    assert collectives(text, 2) == []
