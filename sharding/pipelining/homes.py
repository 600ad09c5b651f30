"""The home of each value: the coordinate of a stage axis that computes it, and the sends between homes.

A plan splits values over the other axes without regard to homes. Here each node of the SPMD graph gets
the home of its stage, or else of its operands, and a value that is used at a different home is sent
there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from torchard.functional.programs.graphs import add_call, output_node
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, PHASE, SCOPE, SEGMENTS, STEP, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.collective_ops import AllGather, Send
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.layouts.tags import CHUNK, MICROBATCH
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.collectives import op_of, record_of, send

__all__ = ["Home", "home_of", "locate", "send_values"]

Home = tuple[tuple[str, int], ...]


def home_of(node: fx.Node) -> Home:
    """The home of a node's value; () if all ranks have it."""
    layout = LAYOUT.of(node)
    layouts = layout if isinstance(layout, tuple) else (layout,)
    return layouts[0].home if layouts else ()


def locate(graph: fx.Graph, inputs: Sequence[Home]) -> None:
    """Give each value of an SPMD graph its home.

    Args:
        inputs: the homes of the inputs.
    """
    given = iter(inputs)
    shared: set[fx.Node] = set()  # what all ranks hold of the inputs, and compute from it
    for node in graph.nodes:
        if node.op == "placeholder":
            _set_home(node, next(given))
            shared.update([] if home_of(node) else [node])
        elif node.op == "call_function":
            _set_home(node, () if _updates(node, shared) else _computed_at(node))
            if not home_of(node) and not shared.isdisjoint(node.all_input_nodes):
                shared.add(node)
    for node in reversed(graph.nodes):
        users = list(node.users)
        if _is_update(node) and users and not any(u.op == "output" or home_of(u) for u in users):
            _set_home(node, ())


def _is_update(node: fx.Node) -> bool:
    """Whether an operation belongs to no stage, like an optimizer's operations."""
    if node.op != "call_function" or CHUNK.on(node) or STEP.on(node):
        return False
    return PHASE.get(node) != "backward" and isinstance(VAL.get(node), torch.Tensor)


def _updates(node: fx.Node, shared: set[fx.Node]) -> bool:
    """Whether an operation updates a value that all ranks hold, as an optimizer does a tied weight.

    Every rank computes it then, and what only it needs: the gradient is sent, and not each new value.
    """
    if not _is_update(node):
        return False
    val = VAL.of(node)
    held = (VAL.of(o) for o in node.all_input_nodes if o in shared)
    return val.ndim > 0 and any(isinstance(x, torch.Tensor) and x.shape == val.shape for x in held)


def _set_home(node: fx.Node, home: Home) -> None:
    layout = LAYOUT.of(node)
    if isinstance(layout, tuple):
        LAYOUT.set(node, tuple(x.homed(home) for x in layout))
    else:
        LAYOUT.set(node, layout.homed(home))


def _computed_at(node: fx.Node) -> Home:
    """The home of a node's stage; else the last home of its operands, in the backward the first."""
    homes = [home for source in node.all_input_nodes if (home := home_of(source))]
    reduces = STEP.on(node) and not isinstance(op_of(node), AllGather)
    if node.target is operator.getitem or reduces:
        return homes[0] if homes else ()
    if CHUNK.on(node):
        return CHUNK.of(node)[1]
    if not homes:
        return ()
    return min(homes) if PHASE.get(node) == "backward" else max(homes)


def send_values(graph: fx.Graph, wanted: Sequence[Home | None], sizes: Sizes) -> None:
    """Send each value to the homes of the operations that use it, right after it is computed.

    Args:
        wanted: for each output its home; None for that of the value.
    """
    sent: dict[tuple[fx.Node, Home], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            here = home_of(node)
            for source in node.all_input_nodes:
                if home_of(source) not in ((), here):
                    node.replace_input_with(source, _sent(graph, source, here, sent, sizes))
    out = output_node(graph)
    values = list(out.args[0])  # type: ignore[arg-type]
    for i, (value, home) in enumerate(zip(values, wanted, strict=True)):
        if isinstance(value, fx.Node) and home is not None and home != home_of(value):
            values[i] = _sent(graph, value, home, sent, sizes)
    out.args = (tuple(values),)


def _sent(
    graph: fx.Graph, value: fx.Node, home: Home, sent: dict[tuple[fx.Node, Home], fx.Node], sizes: Sizes
) -> fx.Node:
    if (value, home) not in sent and (_is_rearranged(value) or _is_held(value)):
        (base,) = value.all_input_nodes  # sent once, however it is viewed
        moved = base if not home_of(base) else _sent(graph, base, home, sent, sizes)
        with graph.inserting_after(value):
            copied = graph.node_copy(value, lambda node: moved if node is base else node)
        forget(copied, CHUNK, MICROBATCH)
        LAYOUT.set(copied, LAYOUT.of(value).homed(home))
        sent[value, home] = copied
    if (value, home) not in sent:
        after = value if value.op != "placeholder" else graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(after):
            sent[value, home] = _send(value, home, sizes)
    return sent[value, home]


def _is_held(node: fx.Node) -> bool:
    """Whether ranks everywhere hold what a value is gathered from or a copy of, as of a tied weight."""
    if not (STEP.on(node) or is_alias(node) or node.target is aten._to_copy.default):
        return False
    sources = node.all_input_nodes
    if node.target is send or len(sources) != 1:
        return False
    (base,) = sources
    return not home_of(base) or _is_held(base)


def _is_rearranged(node: fx.Node) -> bool:
    """Whether a value is a view of all elements of a second value, at the same home."""
    if not is_alias(node) or len(node.all_input_nodes) != 1:
        return False
    (base,) = node.all_input_nodes
    whole = VAL.of(base)
    return isinstance(whole, torch.Tensor) and whole.numel() == VAL.of(node).numel()


def _send(value: fx.Node, home: Home, sizes: Sizes) -> fx.Node:
    have, want = dict(home_of(value)), dict(home)
    axes = {**have, **want}
    assert len(axes) == 1, "a value moves along one stage axis at a time"
    (axis,) = axes
    layout: Layout = LAYOUT.of(value)
    op = Send((axis,), have.get(axis), want.get(axis))
    step = ReshardStep(op, layout.homed(()), layout.homed(()))
    node = add_call(value, send, value, val=VAL.of(value), axes=op.axes)
    forget(node, SEGMENTS, SCOPE)  # it is between stages, not recomputed with one
    LAYOUT.set(node, layout.homed(home))
    STEP.set(node, step)
    if op.sends:
        COLLECTIVE.set(node, record_of(step, VAL.of(value), value, sizes))
    return node
