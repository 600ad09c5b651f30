"""Regions: parts of a program that a compiler is given one by one; equal ones are compiled once.

In a program with loops the body of each loop is a region, and what runs between loops is one. The
program of a pipeline has the operations of each microbatch. Those of a task between two transfers are a
region; the regions of all microbatches are equal but for their operands. Transfers, and random bits,
whose positions differ, stay outside, and run as Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.checks.looks import indices_of
from torchard.functional.compiling.compiler_repairs import WRITES
from torchard.functional.execution.choices import Conditional
from torchard.functional.execution.reinplacing import written_base
from torchard.functional.programs.graphs import computation, extracted
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.loops import issued_ahead, regrouped
from torchard.functional.programs.markers import Effect, PureCall, after, again, is_marker, listed
from torchard.functional.programs.tagging import forget, inherit
from torchard.functional.programs.tags import AHEAD, CHECKS, LOOP, TASK, VAL
from torchard.functional.programs.views import is_view, storage_of
from torchard.functional.torch_internals.operators import COLLECTIVES
from torchard.functional.updates.kernels import Update

__all__ = ["Region", "Run", "by_regions"]

# Called with a list of operands, and perhaps the positions of those that need not be copied before they
# are written over, whatever else holds them.
Run = Callable[..., Sequence[torch.Tensor]]

_RANDOM_BITS = "torchard.random_bits.default"


def by_regions(
    graph: fx.Graph, compiled: Callable[[fx.Graph, bool], Run], may_write: bool = False
) -> fx.Graph | None:
    """A graph that calls compiled regions; None if it has no loops, no equal regions and no kernels.

    Args:
        graph: the graph, in which items of tuples are moved to the operations that return the tuples.
        compiled: compiles the graph of a region; told whether it is the body of a loop.
        may_write: whether what it compiles may be told to write to operands.
    """
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            (whole,) = node.all_input_nodes
            whole.append(node)
            if LOOP.on(whole):  # a region returns items, also where another loop takes them
                LOOP.set(node, LOOP.of(whole))
    order = _markers_apart(regrouped(graph))
    loops = any(map(LOOP.on, order))
    regions = _parts(order) if loops else _regions(graph)
    keys = [_key(nodes) for nodes in regions]
    if len(set(keys)) == len(keys) and not loops:
        if not any(map(_is_kernel, order)):
            return None
        regions = _parts(order)
        keys = [_key(nodes) for nodes in regions]
    runs: dict[Hashable, Run] = {}
    ends = {nodes[-1]: (nodes, key) for nodes, key in zip(regions, keys, strict=True)}
    inside = {node for nodes in regions for node in nodes}
    outer = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in order:
        if node in ends:
            nodes, key = ends[node]
            if key not in runs:
                runs[key] = compiled(_extracted(nodes), LOOP.on(node))
            _call(outer, nodes, Region(runs[key], nodes, may_write), env)
        elif node not in inside:
            env[node] = outer.node_copy(node, env.__getitem__)
    return outer


def _markers_apart(order: Sequence[fx.Node]) -> list[fx.Node]:
    """The same order, but markers of a loop's entries and exits come before adjacent operations."""
    placed: list[fx.Node] = []
    for _, group in groupby(order, key=LOOP.get):
        nodes = list(group)
        last = [n for n in nodes if n.target in (again, listed)]
        first = [n for n in nodes if n.op == "placeholder" or (is_marker(n) and n not in last)]
        placed += [*first, *(n for n in nodes if n not in {*first, *last}), *last]
    return placed


def _parts(order: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The operations of each loop, and those before, between and after loops and kernels."""
    parts: list[list[fx.Node]] = []
    for (_, is_kernel), nodes in groupby(order, key=lambda n: (LOOP.get(n), _is_kernel(n))):
        if is_kernel:
            continue
        group = list(nodes)
        # What is issued ahead of its iteration, and awaited in it, stays outside.
        apart = set(issued_ahead(group)[0] if LOOP.on(group[0]) else ())
        apart |= {n for n in group if AHEAD.get(n) or is_marker(n)}
        part = [n for n in group if n.op == "call_function" and n not in apart]
        parts += [part] if part else []
    return [nodes for nodes in parts if not all(map(_is_free, nodes))]


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Runs of operations of one task, between transfers; those of views alone are not worth a call.

    What no microbatch changes, such as a transposed weight, is computed before the region.
    """
    regions: list[list[fx.Node]] = []
    current: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not _is_inside(node):
            if _is_transfer(node) or not current.isdisjoint(node.all_input_nodes):
                current = set()
            continue
        if not current or _task(node) != _task(regions[-1][0]):
            regions.append([])
            current = set()
        regions[-1].append(node)
        current.add(node)
    return [nodes for nodes in regions if not all(map(_is_free, nodes))]


def _is_free(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def _is_inside(node: fx.Node) -> bool:
    return bool(_task(node)) and not _is_transfer(node) and not _is_kernel(node)


def _is_kernel(node: fx.Node) -> bool:
    """Whether it runs outside of what is compiled: a kernel, a conditional, a call of Python."""
    target = node.target
    if target is operator.getitem:
        return _is_kernel(node.all_input_nodes[0])
    if CHECKS.on(node) and CHECKS.of(node).index and indices_of(node):
        return True  # compiled code may ignore an index that is too large
    if target is after or isinstance(target, (Update, Conditional, Effect, PureCall)):
        return True
    return isinstance(target, Fused) and target.opaque


def _task(node: fx.Node) -> str:
    """The task of an operation, which is also that of the items it returns."""
    if node.target is operator.getitem:
        return _task(node.all_input_nodes[0])
    return TASK.get(node, "")


def _is_transfer(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_transfer(node.all_input_nodes[0])
    namespace = getattr(node.target, "namespace", "")
    return namespace == COLLECTIVES or str(node.target) == _RANDOM_BITS


def _inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The operands from outside, by first use."""
    inside = set(nodes)
    operands = (source for node in nodes for source in node.all_input_nodes)
    return list(dict.fromkeys(source for source in operands if source not in inside))


def _outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values used outside."""
    inside = set(nodes)
    return [node for node in nodes if not inside.issuperset(node.users)]


def _key(nodes: Sequence[fx.Node]) -> Hashable:
    """A region's computation: operations on numbered values, and the values that are used outside."""
    inputs = _inputs(nodes)
    numbers = {node: i for i, node in enumerate((*inputs, *nodes))}
    checks = tuple(map(CHECKS.get, nodes))
    outputs = tuple(numbers[node] for node in _outputs(nodes))
    return (*computation(nodes, inputs), *outputs, checks, LOOP.on(nodes[0]))


def _extracted(nodes: Sequence[fx.Node]) -> fx.Graph:
    """The graph of a region, from a list of its inputs to a list of its outputs."""
    return extracted(fx.Graph(), nodes, _inputs(nodes), _outputs(nodes))


class Region:
    """A compiled region, which empties the list of operands that it is given.

    Attributes:
        written: the positions of the operands that it writes into, if only as values.
        fresh: by result, whether it is in memory that no operand and no other result is in.
        rewritten: by result, the operand that it is, with some elements written; None if the compiled
            code may not be told to write to operands.
    """

    takes_over = True
    __name__ = "region"

    def __init__(self, run: Run, nodes: Sequence[fx.Node], may_write: bool) -> None:
        self.run = run
        bases = {storage_of(node.all_input_nodes[0]) for node in nodes if node.target in WRITES}
        self.written = {n for n, operand in enumerate(_inputs(nodes)) if operand in bases}
        storages = [storage_of(node) for node in _outputs(nodes)]
        self.fresh = [storage in nodes and storages.count(storage) == 1 for storage in storages]
        self.rewritten = _rewritten(nodes, self.fresh) if may_write else None

    def __call__(
        self, operands: list[torch.Tensor], placed: Sequence[tuple[int, int]] = ()
    ) -> Sequence[torch.Tensor]:
        """Run it.

        Args:
            placed: which results to put in which operands' memory: (operand, result), positions of both.
        """
        if not placed:
            return self.run(operands)
        places = {result: operands[position] for position, result in placed}
        return _put(self.run(operands, [position for position, _ in placed]), places)

    @property
    def code_for(self) -> Any:
        """What gives the compiled code for operands of some strides; None if Python takes part in it."""
        return getattr(self.run, "code_for", None)


def _rewritten(nodes: Sequence[fx.Node], fresh: Sequence[bool]) -> dict[int, int]:
    """By fresh result, the operand that it is, with some elements written; each operand once."""
    operands = {operand: position for position, operand in enumerate(_inputs(nodes))}
    bases = [_first_base(node, operands) for node in _outputs(nodes)]
    return {
        k: operands[base]
        for k, base in enumerate(bases)
        if fresh[k] and base in operands and base not in bases[:k]
    }


def _first_base(result: fx.Node, operands: Collection[fx.Node]) -> fx.Node | None:
    """The first base of the writes that a result is of; None if it has another shape."""
    node: Any = result
    while node not in operands and (is_view(node) or written_base(node) is not None):
        node = node.args[0]
    have, base = VAL.get(result), VAL.get(node)
    if have is None or base is None:
        return None
    return node if (have.shape, have.dtype) == (base.shape, base.dtype) else None


def _put(
    results: Sequence[torch.Tensor], places: Mapping[int, torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Results, some of them in memory of these places, where the compiled code may have written anything.

    Args:
        places: by the position of a result.
    """
    memory = {internals.storage_id(place) for place in places.values()}
    found = list(results)
    for k, result in enumerate(results):
        if k in places and _is_same(result, places[k]):
            found[k] = places[k]
        elif internals.storage_id(result) in memory:
            found[k] = result.clone()
    for k, place in places.items():
        if found[k] is not place:
            found[k] = place.copy_(found[k])
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _call(
    outer: fx.Graph, nodes: Sequence[fx.Node], region: Region, env: dict[fx.Node, fx.Node]
) -> None:
    call = outer.call_function(region, ([env[node] for node in _inputs(nodes)],))
    inherit(call, nodes[0], "place")
    forget(call, AHEAD, CHECKS)  # what is compiled looks at its results itself
    for i, node in enumerate(_outputs(nodes)):
        env[node] = outer.call_function(operator.getitem, (call, i))
        inherit(env[node], node, "place")
        forget(env[node], CHECKS)
