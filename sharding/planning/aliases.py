"""Nodes of a graph that are aliases of their operand, and the layouts of base and alias."""

from __future__ import annotations

import functools
import operator

from torch import fx

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import atomic, factor_axes, image
from torchard.sharding.rules import Call, lookup, rule_of

__all__ = ["is_alias", "pull", "pulled"]


def is_alias(node: fx.Node) -> bool:
    """Whether a node is a bijective view of its operand, or one result of several."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    rule = lookup(node.target)
    return rule is not None and rule.alias


def pull(node: fx.Node, layout: Layout, sizes: Sizes) -> Layout | None:
    """The layout of a view's base that gives the view ``layout``; None if no layout of the base does."""
    return pulled(rule_of(Call.of(node)), layout, sizes)


@functools.lru_cache(maxsize=16384)
def pulled(rule: Rule, layout: Layout, sizes: Sizes) -> Layout | None:
    """The layout of the base of a view with this rule; see `pull`."""
    rule = atomic(rule, [], [layout], sizes)
    axes_of = factor_axes(rule, rule.outs[0], layout, sizes)
    if any(f in rule.whole or f in rule.index for f in axes_of):
        return None
    axes = [axes_of.get(f, ()) for f in range(len(rule.sizes))]
    if image(rule.outs[0], rule, axes, layout.pending, sizes) != layout:
        return None
    return image(rule.ins[0], rule, axes, layout.pending, sizes)
