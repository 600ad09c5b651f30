"""The schedule of collectives: each is issued as soon as its operand is available.

The order is chosen on the SPMD graph, so it is the same on every rank. A collective whose result is no
larger than its operand (a reduction, an all_to_all) is issued right after its operand, ahead of
independent work, and awaited at its first use: the all_reduce of an activation's gradient overlaps with
the weight's matmul. Views and casts of a result are moved down to its first use, and updates to the end,
so that all gradients can be reduced in one call. Gathers stay where they are needed, since an early one
holds memory; gathers of parameters are placed by ``gathers.py``, and merging is done by ``bucket.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchard.functional.core.arguments import check_fields, written
from torchard.functional.costs.flops import is_product
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, PHASE, RECOMPUTE, STEP, VAL
from torchard.sharding.layouts.collective_ops import AllReduce, AllToAll, PsumScatter
from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.updates import updated_inputs
from torchard.sharding.scheduling.bucket import merge_reductions
from torchard.sharding.scheduling.casts import is_cast, is_cheap, narrow_in_turn
from torchard.sharding.scheduling.collectives import op_of
from torchard.sharding.scheduling.gathers import gather_again, gather_by_layer
from torchard.sharding.scheduling.near_gathers import merge_near_gathers
from torchard.sharding.scheduling.scatters import scatter_by_layer

__all__ = ["Schedule", "schedule"]

_EARLY = (AllReduce, PsumScatter, AllToAll)
_FEW = 1024  # elements of what is awaited for long
_CHEAP = 16  # operations


@written("Schedule(prefetch=2)")
@dataclass(frozen=True)
class Schedule:
    """How far ahead of its use communication is issued, and which collectives are merged.

    Attributes:
        prefetch: how many layers ahead of its use a layer's split parameters are gathered. Each layer
            ahead holds one more gathered layer in memory; 0 gathers at the first use, without overlap.
        bucket_bytes: the maximum number of bytes in one merged all_reduce of gradients; a larger
            gradient is sent by itself. None: what is fastest on the machine, at most 25 MiB, or a quarter
            of all gradients if that is more.

    Raises:
        ValueError: a negative distance, or an empty bucket.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> x = ta.place(torch.ones(4, 8), mesh, ta.P("dp"))
    >>> params = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}
    >>> loss = torch.func.grad(lambda params, x: (x @ params["a"] @ params["b"]).sum())
    >>> def calls(schedule):
    ...     plan = ta.shard(loss, mesh, out_specs=ta.P(), schedule=schedule).lower(params, x)
    ...     return [(c.kind, c.shape) for c in plan.collectives]
    >>> calls(ta.Schedule()), calls(ta.Schedule(bucket_bytes=1))
    ([('all_reduce', (128,))], [('all_reduce', (8, 8)), ('all_reduce', (8, 8))])
    """

    prefetch: int = 1
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefetch < 0:
            raise ValueError(
                f"Schedule(prefetch={self.prefetch}): parameters cannot be gathered after their use; "
                "0 gathers them at their first use, 1 one layer ahead."
            )
        if self.bucket_bytes is not None and self.bucket_bytes <= 0:
            raise ValueError(
                f"Schedule(bucket_bytes={self.bucket_bytes}): a bucket sends at least one byte; "
                "1 sends every gradient on its own, None chooses a size."
            )


def schedule(
    program: Program,
    how: Schedule,
    layers: Mapping[fx.Node, str],
    batch: Iterable[str],
    machine: Machine,
    sizes: Sizes,
) -> None:
    """Move the collectives of an SPMD program to where they are issued, and merge them.

    `layers` names the layer of each parameter, `batch` the axes that split the batch; times are those of
    the machine.
    """
    graph = program.graph
    gather_again(graph, layers, batch)
    count_first(graph)
    issue_early(graph)
    update_last(program)
    wait_late(graph)  # after moving users: all views of a merged result must follow it
    merge_reductions(program, machine, sizes, how.bucket_bytes)
    wait_late(graph)  # merged reductions have moved down: views that they send follow, of scatters too
    scatter_by_layer(program)
    narrow_in_turn(graph)
    gather_by_layer(graph, layers, how.prefetch)
    merge_near_gathers(graph)


def count_first(graph: fx.Graph) -> None:
    """Move small reductions of inputs, as the count of a batch's targets, to the beginning.

    The ranks would otherwise wait for one another at the loss.
    """
    if not (placeholders := graph.find_nodes(op="placeholder")):
        return
    last, moved = placeholders[-1], set[fx.Node]()
    for node in list(graph.nodes):
        if _is_sum(node) and VAL.of(node).numel() <= _FEW:
            for needed in _cheap_operands(node):
                if needed not in moved:  # two counts may read one value
                    last.append(needed)
                    last = needed
                    moved.add(needed)


def _cheap_operands(node: fx.Node) -> list[fx.Node]:
    """The operations that a value depends on, operands first, if they are few and cheap; else none."""
    found, stack = {node}, [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand.op == "placeholder" or operand in found:
                continue
            dear = _sends(operand) or is_product(operand) or RECOMPUTE.get(operand)
            if dear or operand.op != "call_function" or LOOP.on(operand) or len(found) > _CHEAP:
                return []
            found.add(operand)
            stack.append(operand)
    return [] if LOOP.on(node) or RECOMPUTE.get(node) else sorted(found)


def issue_early(graph: fx.Graph) -> None:
    """Move collectives, and the views and casts that they send, up to their operands.

    A recomputed one is not moved: its operand may have been kept since the forward.
    """
    placeholders = graph.find_nodes(op="placeholder")
    for node in list(graph.nodes):
        if not isinstance(op_of(node), _EARLY) or RECOMPUTE.get(node):
            continue
        chain = [node]
        while _is_sent_alone(chain[-1].all_input_nodes[0]):
            chain.append(chain[-1].all_input_nodes[0])
        after = chain[-1].all_input_nodes[0]
        if after.op == "placeholder":
            after = placeholders[-1]
        for moved in reversed(chain):
            after.append(moved)
            after = moved


def _is_sent_alone(node: fx.Node) -> bool:
    return is_alias(node) or (is_cast(node) and len(node.users) == 1)


def wait_late(graph: fx.Graph) -> None:
    """Move views and casts of a collective's result down to their first use, and erase unused ones."""
    for node in reversed(list(graph.nodes)):
        if not is_cheap(node) or not _arrives(node):
            continue
        if not node.users:
            graph.erase_node(node)
        else:
            min(node.users).prepend(node)  # nodes compare by their current positions


def update_last(program: Program) -> None:
    """Move nodes that only compute new parameters from gradients to the end, one parameter at a time.

    All gradients can then be reduced before the first update; otherwise each reduction would be between
    its gradient and its update, since SGD multiplies a gradient that is still pending by the rate. And
    each update is complete before the next begins, so that temporaries are those of one parameter, and
    the replaced parameter can be freed.
    """
    results = program.graph.output_node()
    late = _only_updates(program)
    for value in program.results:
        for node in _ends_of(value, late):
            results.prepend(node)
            late.discard(node)


def _only_updates(program: Program) -> set[fx.Node]:
    """Nodes used by updated inputs only that belong to the optimizer or depend on an all_reduce."""
    graph = program.graph
    results = graph.output_node()
    ends = {program.results[i] for i in updated_inputs(graph, program.outputs)}
    arrived: set[fx.Node] = set()
    for node in graph.nodes:
        waits = any(_is_sum(source) or source in arrived for source in node.all_input_nodes)
        if waits and not _condenses(node):
            arrived.add(node)
    late: set[fx.Node] = set()  # all users of a late node are late
    for node in reversed(graph.nodes):
        # what an iteration hands on has no users
        kept = node.op != "call_function" or STEP.on(node) or not node.users
        waits = node in arrived or PHASE.get(node) != "backward"
        if waits and not kept and all(u in late or (u is results and node in ends) for u in node.users):
            late.add(node)
    return late


def _condenses(node: fx.Node) -> bool:
    """Whether an operation frees its operands: a product, or a result that is smaller than one of them.

    A gradient is computed where it can be, though the activation's gradient that it is computed from
    was reduced: put off, it would hold the activations of all layers.
    """
    sizes = [VAL.of(n).numel() for n in (node, *node.all_input_nodes) if hasattr(VAL.get(n), "numel")]
    return is_product(node) or (len(sizes) > 1 and sizes[0] < max(sizes))


def _ends_of(value: Any, late: set[fx.Node]) -> list[fx.Node]:
    """The late nodes that a result depends on, operands first."""
    needed: dict[fx.Node, None] = {}
    stack = [value] if value in late else []
    while stack:
        node = stack[-1]
        missing = [n for n in node.all_input_nodes if n in late and n not in needed]
        stack.extend(reversed(missing))
        if not missing:
            needed[stack.pop()] = None
    return list(needed)


def _sends(node: fx.Node) -> bool:
    op = op_of(node)
    return op is not None and op.sends


def _is_sum(node: fx.Node) -> bool:
    return isinstance(op_of(node), AllReduce)


def _arrives(node: fx.Node) -> bool:
    while is_cheap(node):
        node = node.all_input_nodes[0]
    return STEP.on(node)
