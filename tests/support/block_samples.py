"""Sample calls of what moves elements between the blocks of a split dim."""

from __future__ import annotations

from typing import Any

import torch
from sample_calls import S, Sample, bools, ids, x

ours = torch.ops.torchard

# Of a dim of 12 in blocks of 4: block, start, length, step and place. Neighbours, far elements, two
# runs, every third element, what is its own.
RUNS = [
    *(0, 0, 5, 1, 1),
    *(1, 1, 4, 3, 0),
    *(2, 10, 2, 1, 0),
    *(2, 0, 3, 1, 2),
]

BLOCKS: dict[Any, list[Sample]] = {
    ours.blocks.default: [
        S(x(4, 12), 1, 3, 0),
        S(x(5, 3), 0, 2, 1.5),
        S(x(13, 2), 0, 6, 0),
        S(x(2, 1), 1, 3, 0),
    ],
    ours.unblocks.default: [
        S(x(2, 3, 4), 1, 12),
        S(x(2, 3, 4, 3), 1, 10),
        S(x(6, 1), 0, 3),
        S(x(2, 3), 0, 5),
    ],
    ours.windows.default: [
        S(x(3, 4), 0, RUNS, 6, 0),
        S(x(2, 3, 4, 3), 1, RUNS, 7, -1.0),
        S(bools(3, 4), 0, RUNS, 6, True),
        S(x(2, 5), 0, [0, 0, 5, 1, 0, 1, 5, 5, 1, 0], 5, 0),
        S(x(6, 2, 2), 0, [n for j in range(6) for n in (j, max(2 * j - 1, 0), 2, 1, 0)], 2, 0),
        S(ids(9, 2, 3), 0, [0, 3, 3, 1, 0], 3, 7),
    ],
    ours.sums_from.default: [S(x(5, 4), 0), S(x(5, 4), -1), S(x(2, 3, 2), 1)],
}
