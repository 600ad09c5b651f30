"""Gathers that are needed at one place are sent by one call: the keys and values of an attention.

Where positions are split, every query reads all keys, and then all values. Both are known before the
first is used, so the values are gathered with the keys: at most one product earlier than by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.tags import LOOP, RECOMPUTE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.collective_ops import AllGather
from torchard.sharding.layouts.tags import BUCKET
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.bucket import common, merge
from torchard.sharding.scheduling.collectives import op_of
from torchard.sharding.scheduling.gathers import root_of

__all__ = ["merge_near_gathers"]


_COPIES = (aten.clone.default, aten.expand.default)


def merge_near_gathers(graph: fx.Graph) -> None:
    """Merge gathers of activations whose results are used next to one another, in place."""
    kinds: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if _may_merge(node):
            kinds.setdefault((LOOP.get(node), RECOMPUTE.get(node), common(node)), []).append(node)
    for gathers in kinds.values():
        run: list[fx.Node] = []
        for node in gathers:
            if run and not _joins(node, run):
                _merge(run)
                run = []
            run.append(node)
        _merge(run)


def _may_merge(node: fx.Node) -> bool:
    """Whether a node gathers what is computed and read, and is in no bucket.

    Inputs are gathered layer by layer, or each where it is used (`gathers.py`). Results are gathered one
    by one: together they would be in memory twice.
    """
    if not isinstance(op_of(node), AllGather) or BUCKET.on(node) or not node.users:
        return False
    if _is_result(node):
        return False
    return root_of(node).op != "placeholder" and VAL.of(node).dtype != torch.bool


def _is_result(node: fx.Node) -> bool:
    """Whether a value or a view of it is a result of the program."""
    return any(user.op == "output" or (is_alias(user) and _is_result(user)) for user in node.users)


def _joins(node: fx.Node, run: list[fx.Node]) -> bool:
    """Whether a gather can be issued with others, before their first use, and waits there for little."""
    use = _first_user(run)
    if node < use:
        return True
    if RECOMPUTE.get(node) or not _base(node) < use:
        return False
    between, at = 0, use
    while at is not node:
        between += is_product(at)
        at = at.next
    return between <= 1


def _first_user(gathers: list[fx.Node]) -> fx.Node:
    return min(user for node in gathers for user in node.users)  # nodes compare by their positions


def _base(gather: fx.Node) -> fx.Node:
    """The value that a gather sends a view or a copy of."""
    node = gather.all_input_nodes[0]
    while is_alias(node) or node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _merge(run: list[fx.Node]) -> None:
    """Send some gathers by one call, right before the first use of a result."""
    if len(run) < 2:
        return
    use = _first_user(run)
    for node in run:
        views: list[fx.Node] = []
        view = node.all_input_nodes[0]
        while use < view:
            views.append(view)
            view = view.all_input_nodes[0]
        for moved in (*reversed(views), node):
            use.prepend(moved)
    merge(run, run[-1])
