"""What an operation iterates over, by its factor rule: its work, as plans are compared by it."""

from __future__ import annotations

import functools
import math

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Sizes

__all__ = ["points"]

Factors = frozenset[int]


@functools.lru_cache(maxsize=65536)
def points(rule: Rule, axes: tuple[tuple[str, ...], ...], sizes: Sizes) -> int:
    """Points of the iteration space that the busiest rank computes; without axes, all of them."""
    if rule.ties or rule.halo is not None:
        return 0  # blocks are a view, and windows what has arrived
    table = dict(sizes)
    each = axes or ((),) * len(rule.sizes)
    local = [_local_size(n, a, table) for n, a in zip(rule.sizes, each, strict=True)]
    shared, tensors = _space(rule)
    product = max(math.prod(local[f] for f in group) for group in shared)
    rest = max((math.prod(local[f] for f in t & rule.whole) for t in tensors), default=1)
    own = max((math.prod(local[f] for f in t) for t in tensors), default=1)
    return max(product * rest, own)


def _local_size(size: int, axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    for a in axes:
        size = -(-size // sizes[a])
    return max(size, 1)


@functools.lru_cache(maxsize=65536)
def _space(rule: Rule) -> tuple[tuple[Factors, ...], tuple[Factors, ...]]:
    """What an operation iterates over: products of shared factors, and whole tensors.

    A factor on one tensor alone is read or looked up there, as a table's rows are; those that stand
    for the same points on different tensors, as a slice's two sizes do, are not multiplied. Shared
    factors multiply, as in a contraction, where some tensor has both: the places of a scatter and
    what it scatters into do not.
    """
    tensors = tuple(frozenset(f for d in dims for f in d) for dims in (*rule.ins, *rule.outs))
    rewritten = rule.whole | {f for pair in rule.ties for f in pair}
    everywhere = frozenset.intersection(*tensors) if tensors else Factors()
    groups: list[Factors] = []
    for f in range(len(rule.sizes)):
        on = [t for t in tensors if f in t]
        if len(on) >= 2 and f not in rewritten | everywhere:
            groups = _joined(groups, f, frozenset().union(*on))
    shared = tuple(g | everywhere for g in groups) or (everywhere,)
    return tuple(g - rewritten for g in shared), tensors


def _joined(groups: list[Factors], factor: int, near: Factors) -> list[Factors]:
    """The groups with a factor, which joins all those that share a tensor with it."""
    met = [g for g in groups if g & near]
    return [*(g for g in groups if g not in met), Factors({factor}).union(*met)]
