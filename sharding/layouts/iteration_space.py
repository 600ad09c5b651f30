"""The iteration space of an operation, from its factor rule: the work by which plans are compared."""

from __future__ import annotations

import functools
import math

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Sizes

__all__ = ["points"]

Factors = frozenset[int]


@functools.lru_cache(maxsize=16384)
def points(rule: Rule, axes: tuple[tuple[str, ...], ...], sizes: Sizes) -> int:
    """The points of the iteration space that the busiest rank computes; without axes, all of them."""
    if rule.ties or rule.halo is not None:
        return 0  # blocks are a view, and windows are received data: nothing is computed
    table = dict(sizes)
    splits = axes or ((),) * len(rule.sizes)
    local = [_local_size(n, a, table) for n, a in zip(rule.sizes, splits, strict=True)]
    shared, tensors = _space(rule)
    product = max(math.prod(local[f] for f in group) for group in shared)
    rest = max((math.prod(local[f] for f in t & rule.whole) for t in tensors), default=1)
    own = max((math.prod(local[f] for f in t) for t in tensors), default=1)
    return max(product * rest, own)


def _local_size(size: int, axes: tuple[str, ...], sizes: dict[str, int]) -> int:
    for a in axes:
        size = -(-size // sizes[a])
    return max(size, 1)


@functools.lru_cache(maxsize=16384)
def _space(rule: Rule) -> tuple[tuple[Factors, ...], tuple[Factors, ...]]:
    """The groups of factors whose sizes multiply to the iteration space, and the factors of each tensor.

    Factors that are on several tensors multiply, as in a contraction, where some tensor has both; the
    positions of a scatter and the dim that it scatters into are on no common tensor, and do not. A factor
    on one tensor alone is not iterated over but looked up, as the rows of an embedding table are. Factors
    that denote the same points on different tensors, as the two sizes of a slice do, do not multiply.
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


def _joined(groups: list[Factors], factor: int, beside: Factors) -> list[Factors]:
    """The groups after adding a factor, which joins those with a factor ``beside`` it on some tensor."""
    joined = [g for g in groups if g & beside]
    return [*(g for g in groups if g not in joined), Factors({factor}).union(*joined)]
