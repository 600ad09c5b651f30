"""Rates that explain measured seconds: launches, FLOPs, bandwidth, each operation's share of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchard.functional.costs.seconds import BY_MEMORY
from torchard.sharding.measuring.operations import Sample

__all__ = ["Rates", "explained"]

# Operations whose rate is the machine's; that of others is relative to it.
_PRODUCTS = ("aten.mm", "aten.addmm")


class Rates(NamedTuple):
    """Fields of `Machine`."""

    flops: float
    bandwidth: float
    launch: float
    view: float
    efficiency: Mapping[str, float]


def explained(samples: Sequence[Sample]) -> Rates:
    """The rates by which samples took as long as they did.

    The smallest operations are launches; from others the launch is subtracted. Each rate is what samples
    reach together, so that they weigh as much as they take: small ones may be in a cache.
    """
    computing = [s for s in samples if not s.view and s.bytes]
    seconds = sorted(s.seconds for s in computing)
    launch = seconds[len(seconds) // 20]
    busy = {s: max(s.seconds - launch, launch / 20) for s in computing}
    products = sorted((s for s in computing if s.name in _PRODUCTS), key=lambda s: s.flops / s.bytes)
    products = products[len(products) // 2 :]  # memory may bound the others
    moves = [s for s in computing if not s.flops]
    rate = sum(s.flops for s in products) / sum(busy[s] for s in products)
    bandwidth = sum(s.bytes for s in moves) / sum(busy[s] for s in moves)
    alike: defaultdict[str, float] = defaultdict(float)
    took: defaultdict[str, float] = defaultdict(float)
    for s in computing:
        multiplies, moves_bytes = s.flops / rate, s.bytes / bandwidth
        if max(multiplies, moves_bytes) > launch / 4:  # what is smaller is all launch
            name = s.name + BY_MEMORY * (0 < multiplies < moves_bytes)
            alike[name] += max(multiplies, moves_bytes)
            took[name] += busy[s]
    return Rates(
        rate,
        bandwidth,
        launch,
        statistics.median(s.seconds for s in samples if s.view),
        {name: alike[name] / took[name] for name in sorted(took)},
    )
