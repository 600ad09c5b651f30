"""Gathers of split parameters: one per layer and pass, ahead of use, and again in the backward.

A parameter that is split over the batch's axis (ZeRO, Rajbhandari et al. 2020, §5.3; FSDP, Zhao et al.
2023, §3) is gathered only while a layer uses it. The backward needs it again; keeping it would defeat the
split, so the backward gathers it again. The parameters of one layer are gathered by one call, a fixed
number of layers before they are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.markers import listed, row
from torchard.functional.programs.tags import AHEAD, LOOP, PHASE, STEP, VAL
from torchard.functional.remat.rematerialise import tag_version
from torchard.sharding.layouts.collective_ops import AllGather, PsumScatter
from torchard.sharding.layouts.tags import AFTER, BUCKET, TURN
from torchard.sharding.manual.manual_collectives import is_edge
from torchard.sharding.scheduling.bucket import common, first_use, merge, positions
from torchard.sharding.scheduling.casts import is_cast, is_cheap
from torchard.sharding.scheduling.collectives import op_of

__all__ = ["gather_again", "gather_by_layer", "layer_of", "root_of"]


def layer_of(path: str) -> str:
    """The layer of a parameter: its path up to the last number, else without its last component."""
    numbered = re.match(r"(.*(?:\[\d+\]|\.\d+(?=[.'\"])))", path)
    return numbered[1] if numbered and numbered.end() < len(path) else path.rpartition("[")[0]


def gather_again(graph: fx.Graph, parameters: Iterable[fx.Node], axes: Iterable[str]) -> None:
    """Duplicate gathers over the batch's axes that forward and backward share.

    Gathers over other axes (the sequence's, for a split weight) are repeated only by the user's policy.
    """
    cotangents, batch, at = _after_cotangents(graph), set(axes), positions(graph)
    for node in list(_gathers(graph, set(parameters))):
        if not batch.issuperset(STEP.of(node).axes):
            continue
        late = [u for u in _chain_users(node) if u in cotangents]
        if len(late) < len(_chain_users(node)):
            copies: dict[fx.Node, fx.Node] = {}
            for user in sorted(late, key=at.__getitem__):  # the copy is inserted before the first user
                _swap_inputs(user, node, copies)
    for node in list(_gathers(graph, set(parameters))):
        if LOOP.on(node):
            _take_rows(node)


def _take_rows(node: fx.Node) -> None:
    """Let a gather take its row itself, if another loop takes it: then it depends on no other loop."""
    for source in node.all_input_nodes:
        if LOOP.get(source) is LOOP.of(node) and is_cast(source):
            _take_rows(source)
        if LOOP.get(source) in (None, LOOP.of(node)) or not _is_of_row(source):
            continue
        with node.graph.inserting_after(source):  # wherever the gather is moved, it comes before
            copy = node.graph.node_copy(source)
        if PHASE.get(node) == "backward":
            tag_version(copy, source)
        LOOP.set(copy, LOOP.of(node))
        node.replace_input_with(source, copy)
        _take_rows(copy)


def _is_of_row(node: fx.Node) -> bool:
    """Whether a value is a row, or a view or a cast of one."""
    while node.target is not row and is_cheap(node):
        node = node.all_input_nodes[0]
    return node.target is row


def _after_cotangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a cotangent."""
    return {n for n in graph.nodes if n.op == "call_function" and PHASE.get(n) == "backward"}


def _gathers(graph: fx.Graph, parameters: set[fx.Node]) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if isinstance(op_of(node), AllGather) and root_of(node) in parameters:
            yield node


def root_of(node: fx.Node) -> fx.Node:
    """The value that a node is a view, cast, row, reshard or shard of; of listed ones the first."""
    while node.op == "call_function" and (
        is_cheap(node) or node.target in (row, listed) or is_edge(node) or STEP.on(node)
    ):
        node = node.all_input_nodes[0]
    return node


def _chain_users(node: fx.Node) -> list[fx.Node]:
    """The users of a value, directly or through views and casts."""
    users: list[fx.Node] = []
    for user in node.users:
        users.extend(_chain_users(user) if is_cheap(user) else [user])
    return users


def _swap_inputs(user: fx.Node, gather: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Let a node of the backward use a copy of a gather, of its views, and of the casts that it sends."""
    before = _sent(gather) if any(map(is_cast, _sent(gather))) else []

    def copied(node: fx.Node) -> fx.Node:
        if node not in (gather, *before) and not (is_cheap(node) and _is_view_of(node, gather)):
            return node
        if node not in copies:
            copy = user.graph.node_copy(node, copied)
            tag_version(copy, node)
            if LOOP.on(node):
                LOOP.set(copy, LOOP.get(user, LOOP.of(node)))
            copies[node] = copy
        return copies[node]

    with user.graph.inserting_before(user):
        for source in list(user.all_input_nodes):
            new = copied(source)
            if new is not source:
                user.replace_input_with(source, new)


def _sent(gather: fx.Node) -> list[fx.Node]:
    """The views and casts of a shard that lead to what a gather sends, operands first."""
    chain: list[fx.Node] = []
    node = gather.all_input_nodes[0]
    while is_cheap(node):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1]


def _is_view_of(node: fx.Node, base: fx.Node) -> bool:
    """Whether a node is a value, or a view or a cast of it."""
    while is_cheap(node) and node is not base:
        node = node.all_input_nodes[0]
    return node is base


def gather_by_layer(graph: fx.Graph, layers: Mapping[fx.Node, str], ahead: int) -> None:
    """Merge the gathers of each layer's parameters, and issue them ``ahead`` layers before their use.

    Scatters of gradients are throttled: those of a layer have completed when the layer after the next
    begins, so that unreduced gradients do not accumulate.
    """
    kinds: dict[tuple[Any, ...], dict[Any, list[fx.Node]]] = {}
    for node in _gathers(graph, set(layers)):
        if _is_of_parameter(node.all_input_nodes[0]) and VAL.of(node).dtype != torch.bool:
            layer = LOOP.get(node, layers[root_of(node)])
            key = LOOP.get(node), common(node)
            kinds.setdefault(key, {}).setdefault(layer, []).append(node)
    begins: set[fx.Node] = set()
    for by_layer in kinds.values():
        members = [node for bucket in by_layer.values() for node in bucket]
        firsts = _place(graph, list(by_layer.values()), ahead)
        if PHASE.get(members[0]) == "backward":
            begins.update(firsts)
        for node in (node for node in members if LOOP.on(node)):
            if distance := min(ahead, LOOP.of(node).count - 1):
                AHEAD.set(node, distance)
    _number_turns(graph, begins)


def _is_of_parameter(node: fx.Node) -> bool:
    """Whether a node is an input, or a row of one or of a list of them; or its view or cast."""
    while node.target in (row, listed) or is_cheap(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _place(graph: fx.Graph, buckets: list[list[fx.Node]], ahead: int) -> list[fx.Node]:
    """Issue each bucket before the first use of the bucket ``ahead`` of it; return the first uses.

    The earlier bucket is unpacked first (``after``), so that the two receive buffers are never both held.
    """
    at = positions(graph)
    users = [min((u for n in b for u in n.users), key=at.__getitem__) for b in buckets]
    order = sorted(range(len(buckets)), key=lambda k: min(first_use(n, at) for n in buckets[k]))
    for place, k in enumerate(order):
        members = buckets[k]
        earlier = order[max(place - ahead, 0)]
        for node in members:
            for moved in (*_sent_alone(node), node):
                users[earlier].prepend(moved)
            if place >= ahead > 0:
                AFTER.set(node, BUCKET.get(buckets[earlier][0]))
        if len(members) > 1:
            merge(members, members[-1])
    return users


def _sent_alone(gather: fx.Node) -> list[fx.Node]:
    """What a gather sends, as values that nothing else reads: they are computed where it is issued."""
    chain, user = _sent(gather), gather
    for i, node in reversed(list(enumerate(chain))):
        if len(node.users) > 1:
            with gather.graph.inserting_before(gather):
                chain[i] = gather.graph.node_copy(node)
            user.replace_input_with(node, chain[i])
        user = chain[i]
    return chain


def _number_turns(graph: fx.Graph, begins: set[fx.Node]) -> None:
    """Number the layers of the backward, in tags on their first uses and on the scatters."""
    turn = 0
    for node in graph.nodes:
        if node in begins:
            turn += 1
            TURN.set(node, turn)
        elif begins and isinstance(op_of(node), PsumScatter):
            TURN.set(node, turn)
