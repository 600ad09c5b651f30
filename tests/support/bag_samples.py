"""Sample calls of bags of rows: bags of several sizes, empty ones, padding and ties."""

from __future__ import annotations

from typing import Any

import torch
from sample_calls import S, Sample, bools, ids, x

from torchard.sharding.rules.data_movement import bags as rules

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty
TABLE, IDS, WEIGHTS = x(6, 4, low=-1, high=2), ids(6, 8), x(8)


def forward(mode: int, weights: bool = False, padding: int = -1, last: bool = False) -> Sample:
    offsets = torch.cat([OFFSETS, torch.tensor([8])]) if last else OFFSETS
    each = WEIGHTS if weights else None
    return S(TABLE, IDS, offsets, False, mode, False, each, last, padding, tolerance=1e-14)


def backward(mode: int, **options: Any) -> Sample:
    given = forward(mode, **options)
    _, ids_, offsets, *_, weights, _, padding = given.args
    out, *saved = aten._embedding_bag(*given.args)
    rest = (len(TABLE), False, mode, False, weights, padding)
    return S(x(*out.shape), ids_, offsets, *saved, *rest, tolerance=1e-14)


def weights_backward(padding: int = -1) -> Sample:
    _, numbers, *_ = aten._embedding_bag(*forward(0, weights=True, padding=padding).args)
    return S(x(4, 4), TABLE, IDS, OFFSETS, numbers, 0, padding)


KINDS: list[dict[str, Any]] = [
    *({"mode": mode} for mode in range(3)),
    *({"mode": mode, "padding": int(IDS[3])} for mode in range(3)),
    {"mode": 0, "weights": True},
    {"mode": 1, "last": True},
    {"mode": 2, "last": True, "padding": int(IDS[0])},
]
BAG = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3])
COUNTS = bools(8)
BEST = rules.largest_of_bags(TABLE, IDS, COUNTS, BAG, 4)
BAGS: dict[Any, list[Sample]] = {
    aten._embedding_bag.default: [forward(**kind) for kind in KINDS],
    # With the last offset given, torch's kernel and its fake kernel return sizes of two shapes.
    aten._embedding_bag_forward_only.default: [forward(**k) for k in KINDS if "last" not in k],
    aten._embedding_bag_backward.default: [backward(**kind) for kind in KINDS],
    aten._embedding_bag_per_sample_weights_backward.default: [
        weights_backward(),
        weights_backward(padding=int(IDS[3])),
    ],
    torch.ops.torchard.largest_of_bags.default: [S(TABLE, IDS, COUNTS, BAG, 4)],
    torch.ops.torchard.first_of_bags.default: [S(TABLE, IDS, COUNTS, BAG, BEST)],
}
