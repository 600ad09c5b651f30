"""Liveness of programs: the memory that one holds at each operation, from the list of what it runs.

A program without a mesh is read as it is, by the values and views that its nodes declare. On a mesh it
is what one rank runs, padding and buffers of collectives included: the rank's graph, which is run once on
fake tensors for the sizes of its values and for what shares memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.execution.donated import donated_inputs
from torchard.functional.execution.observed import observed, results_of
from torchard.functional.execution.reinplacing import Reinplaced, reinplaced
from torchard.functional.execution.sequencing import RankList, instructions_of, what_runs
from torchard.functional.execution.storages import Fresh, Liveness, Results
from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.loops import loops_together, regrouped
from torchard.functional.programs.program import Program, RankGraph
from torchard.functional.programs.running_sums import added_product, sum_so_far
from torchard.functional.programs.tags import HALF, VAL
from torchard.functional.programs.unrolled import has_loops
from torchard.functional.programs.views import base_of, handed_value, storage_of
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import halves_of
from torchard.functional.torch_internals import ProgramGraph
from torchard.functional.updates.in_place import in_copies, written_operands
from torchard.functional.updates.merging import with_updates

__all__ = [
    "Storage",
    "as_run",
    "bytes_in",
    "lists_of",
    "liveness",
    "liveness_of_ranks",
    "order_of",
    "peak_of",
    "storage_key",
    "writes_of",
]


class Storage(NamedTuple):
    """The storages that a node allocates for one of its results, in all iterations."""

    node: fx.Node
    item: int = 0


def order_of(program: Program) -> list[fx.Node]:
    """The operations of a program in execution order; of a joint program, forward then backward.

    Those of a loop are together.
    """
    if program.is_joint:
        forward, backward = halves_of(program)
        both = [*loops_together(forward), *loops_together(backward)]
        return list(dict.fromkeys(both))  # a backward takes views again that its forward took
    return [node for node in regrouped(program.graph) if node.op == "call_function"]


def peak_of(program: Program) -> int:
    """The most bytes that are alive at once; of a pipeline, on the rank that holds most."""
    return max(live.peak for live in liveness_of_ranks(program))


def lists_of(program: Program) -> list[RankList]:
    """What each rank runs that may hold other values than others; one without a mesh."""
    if program.runtime is None:
        return [_listed(as_run(program))]
    donated = donated_inputs(program)
    ranks = program.runtime.ranks(_in_execution_order(with_updates(program)), direct=True)
    return [_of_rank(rank, donated) for rank in ranks]


def as_run(program: Program) -> Program:
    """The program with the operations that generated code runs: its updates, in copies."""
    program = with_updates(program)
    return replace(program, graph=in_copies(program.graph) or program.graph)


def liveness_of_ranks(program: Program) -> list[Liveness]:
    """The liveness of each rank that may hold other values than others; one without a mesh."""
    return [listed.alive for listed in lists_of(program)]


def _of_rank(rank: RankGraph, donated: Sequence[int]) -> RankList:
    graph, runs = what_runs(rank.graph, donated, HALF.get)
    inputs = list(graph.find_nodes(op="placeholder"))
    values = observed(graph, rank.inputs)
    return RankList(runs, inputs, donated, results_of(values), values, rank.home)


def _in_execution_order(program: Program) -> Program:
    """The program with its operations in execution order.

    In one graph, a collective whose result the caller alone reads is awaited at the end, not by the
    forward: what it sends, such as a loss on each rank, counts until then.
    """
    if not program.is_joint:
        return program
    program = with_loop_residuals(program)
    graph, copies = ProgramGraph(), dict[fx.Node, fx.Node]()
    forward = set(halves_of(program)[0])
    for node in (*program.placeholders, *order_of(program), program.graph.output_node()):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        HALF.set(copies[node], "forward" if node in forward else "backward")
    return replace(program, graph=graph)


def liveness(program: Program) -> Liveness:
    """The liveness of a program's own graph; of a joint program, of its forward, then its backward.

    On a mesh, each value has the size of the largest shard, and collectives have no buffers: budgets
    choose values by this estimate, and go by the peaks of ranks.
    """
    return _listed(program).alive


def _listed(program: Program) -> RankList:
    if program.is_joint:
        program = with_loop_residuals(program)
    runs, inputs = _what_runs(program), program.placeholders
    return RankList(runs, inputs, donated_inputs(program), _declared(program))


def writes_of(program: Program) -> Mapping[fx.Node, bool]:
    """The operations that write to their base, each with whether its value already lies there.

    None of a joint program that runs unrolled, whose operations are others.
    """
    runs = with_loop_residuals(program) if program.is_joint else program
    if has_loops(program) and not has_loops(runs):
        return {}
    written = {node.name: lies for node, lies in _what_runs(runs).nodes.items()}  # names are kept
    return {node: written[node.name] for node in program.calls if node.name in written}


def _what_runs(program: Program) -> Reinplaced:
    inputs = program.placeholders
    order = [*inputs, *order_of(program), program.graph.output_node()]
    forward = set(halves_of(program)[0]) if program.is_joint else None
    return reinplaced(
        instructions_of(order),
        inputs,
        donated_inputs(program),
        lambda node: forward is None or node in forward,
    )


def _declared(program: Program) -> Results:
    """The results of nodes, from the views and running sums that they declare."""
    size = bytes_in(program)
    sums = (added_product(node) for node in program.calls if sum_so_far(node) is not None)
    merged = set(sums)  # products that are computed into a running sum

    def results(node: fx.Node) -> Any:
        val: Any = VAL.get(node)
        if bases := written_operands(node):
            return list(bases)
        source = sum_so_far(node) or base_of(node)

        def one(x: Any, item: int = 0) -> Any:
            if source is not None:
                return source
            nbytes = 0 if node in merged else size(node, item)
            return Fresh(x, nbytes) if isinstance(x, torch.Tensor) else None

        return [one(x, k) for k, x in enumerate(val)] if isinstance(val, (tuple, list)) else one(val)

    return results


def storage_key(node: fx.Node) -> Storage:
    """The storage of a value; in a loop, in any iteration."""
    root = handed_value(storage_of(node))
    while (before := sum_so_far(root)) is not None:
        root = storage_of(before)
    if root.target is operator.getitem:
        whole, item = root.args
        assert isinstance(whole, fx.Node) and isinstance(item, int)
        return Storage(whole, item)
    return Storage(root)


def bytes_in(program: Program) -> Callable[[fx.Node, int], int]:
    """A function for the bytes of a result of a node, by the program's runtime."""
    return bytes_of if program.runtime is None else program.runtime.bytes_of
