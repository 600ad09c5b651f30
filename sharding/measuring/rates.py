"""Rates that explain measured seconds: launches, FLOPs, bandwidth, each operation's share of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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

    The smallest operations are launches; from others the launch is subtracted. Each rate is the geometric
    mean of what samples reach, so that a large size weighs no more than a small one.
    """
    computing = [s for s in samples if not s.view and s.bytes]
    seconds = sorted(s.seconds for s in computing)
    launch = seconds[len(seconds) // 20]
    busy = {s: max(s.seconds - launch, launch / 20) for s in computing}
    rate = _mean(s.flops / busy[s] for s in computing if s.name in _PRODUCTS)
    bandwidth = _mean(s.bytes / busy[s] for s in computing if not s.flops)
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for s in computing:
        alike = max(s.flops / rate, s.bytes / bandwidth)
        if alike > launch / 4:  # what is smaller is all launch
            shares[s.name].append(alike / busy[s])
    return Rates(
        rate,
        bandwidth,
        launch,
        statistics.median(s.seconds for s in samples if s.view),
        {name: _mean(each) for name, each in sorted(shares.items())},
    )


def _mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
