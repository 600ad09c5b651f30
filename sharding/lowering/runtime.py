"""Runtimes, which run an SPMD program on the ranks of this process.

A program names mesh axes, never process groups. ``Simulated`` lowers all coordinates of a virtual mesh
into one graph; ``Distributed`` lowers this rank's own over the mesh's process groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.execution.binding import Compiling
from torchard.functional.execution.codegen import compiled
from torchard.functional.execution.donated import donated_parts
from torchard.functional.programs.program import Bound, Placement, Program, RankGraph, Runtime
from torchard.functional.programs.records import Work
from torchard.functional.programs.tags import LAYOUT, STEP, VAL
from torchard.sharding.layouts.collective_ops import Send
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.lowering.call_order import CallOrder, one_call_at_a_time
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.lowering.peephole import dense_rows, fold_views, reduce_in_place
from torchard.sharding.lowering.plan_consistency import (
    agree_on_compiled,
    agree_on_groups,
    agreed,
    know,
    signature_of,
    tell_failure,
)
from torchard.sharding.lowering.process_group_transport import ProcessGroupTransport
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.lowering.work import mesh_work
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.place import MeshPlacement

__all__ = ["Distributed", "Simulated", "runtime_of"]


@dataclass(frozen=True)
class _OnMesh(Runtime):
    """The common base of the runtimes of a mesh."""

    mesh: Mesh

    @abstractmethod
    def _graph(self, program: Program) -> fx.Graph:
        """The graph of this process, from all parts of all inputs to all parts of all outputs."""

    def graph(self, program: Program) -> fx.GraphModule:
        """The graph of this process, as a module for a compiler."""
        return fx.GraphModule(torch.nn.Module(), self._graph(program))

    def residual_tag(self, node: fx.Node) -> Placement:
        """The placement of a residual, between forward and backward."""
        return MeshPlacement.of(self.mesh, LAYOUT.of(node))

    def bytes_of(self, node: fx.Node, item: int = 0) -> int:
        """The bytes of a value on the rank with the largest shard."""
        return _local_bytes(node, item, self.mesh)

    def work(self, program: Program) -> Work:
        """The work of the plan, and how it is split."""
        return mesh_work(program, self.mesh)

    def ranks(self, program: Program, direct: bool = False) -> Sequence[RankGraph]:
        """The program of the first rank; in a pipeline, of the first rank of each stage."""
        first = dict.fromkeys(self.mesh.shape, 0)
        homes = _homes(program) or [()]
        return [self._of_rank(program, first, dict(home), direct) for home in homes]

    def _of_rank(
        self, program: Program, first: dict[str, int], home: dict[str, int], direct: bool
    ) -> RankGraph:
        at = {**first, **home}
        mesh = Mesh(self.mesh.shape, virtual=True)  # which makes no process groups
        graph = _local(Lowering(program.graph, mesh, [at], ProcessGroupTransport(direct)))
        reduce_in_place(graph)
        with internals.no_modes(), internals.FakeTensorMode():
            inputs = [
                torch.empty(
                    LAYOUT.of(node).local_shape(at, self.mesh.shape),
                    dtype=VAL.of(node).dtype,
                    device=VAL.of(node).device,
                )
                for node in program.placeholders
            ]
        return RankGraph(graph, inputs, home)


@dataclass(frozen=True)
class Simulated(_OnMesh):
    """The runtime of a virtual mesh: every rank, in lockstep, in this process."""

    def _graph(self, program: Program) -> fx.Graph:
        transport = self.mesh.transport or SimulatedTransport()
        return _local(Lowering(program.graph, self.mesh, self.mesh.all_coords(), transport))

    def bind(self, program: Program) -> Bound:
        return compiled(self._graph(program), program.name, donated_parts(program))


@dataclass(frozen=True)
class Distributed(_OnMesh):
    """The runtime of a mesh over process groups: this process's rank."""

    check_replicated: bool = True

    def _graph(self, program: Program, direct: bool = False) -> fx.Graph:
        assert self.mesh.coords is not None
        _connect(program, self.mesh)
        transport = self.mesh.transport or ProcessGroupTransport(direct)
        return _local(Lowering(program.graph, self.mesh, [self.mesh.coords], transport))

    def bind(self, program: Program) -> Bound:
        graph = self._graph(program, direct=True)
        reduce_in_place(graph)
        run = compiled(graph, program.name, donated_parts(program))
        return self.guard(program, run, graph)

    def guard(self, program: Program, bound: Bound, graph: fx.Graph) -> Bound:
        """Add checks: before each call, that all ranks make it; before the first, that plans are equal.

        Args:
            graph: the graph that this rank runs.
        """
        if self.mesh.size == 1:
            return bound
        order = CallOrder(self.mesh, program, graph, signature_of(program))

        def run(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if (order.number and not order.needed) or _are_traced(parts):
                return bound(parts)
            with one_call_at_a_time as within:
                if within:
                    return bound(parts)
                _all_call(order, lambda: self._agreed(order, program, bound, parts))
                try:
                    return bound(parts)
                except BaseException as error:
                    know(error)
                    order.failed()
                    raise

        return run

    def _agreed(
        self, order: CallOrder, program: Program, bound: Bound, parts: Sequence[torch.Tensor]
    ) -> int:
        """The number of a new plan, once all ranks have it, and have compiled it if it is compiled."""
        number = agreed(order, program, self.check_replicated, parts)
        internals.let_gloo_wait()  # also in the groups that were made for this plan
        if isinstance(bound, Compiling):
            try:
                bound.prepare(parts)
            except Exception as error:
                tell_failure(self.mesh, error)
                raise
            agree_on_compiled(order)
        return number


def _all_call(order: CallOrder, agree: Callable[[], int]) -> None:
    """Check that all ranks make this call, of a plan that they agree on first."""
    try:
        order.number = order.number or agree()
        order.compare()
    except Exception as error:
        know(error)
        raise


def _homes(program: Program) -> list[tuple[tuple[str, int], ...]]:
    """The homes of a program's values, in order; none if they have none."""
    return sorted({x.home for node in program.graph.nodes for x in _layouts(node) if x.home})


def _connect(program: Program, mesh: Mesh) -> None:
    """Make the groups that a plan needs beside those of single axes: all ranks make all, in one order.

    They agree on it first, as a rank that waits for others to make a group hears of nothing.
    """
    steps = (STEP.of(node).collective for node in program.graph.nodes if STEP.on(node))
    needed: set[tuple[Any, ...]] = set()
    for op in steps:
        if isinstance(op, Send) and op.source is not None and op.to is not None:
            needed.add((op.axes[0], min(op.source, op.to), max(op.source, op.to)))
        elif len(op.axes) > 1:
            needed.add(op.axes)
    made = _made.setdefault(mesh, set())
    new = sorted(needed - made, key=repr)
    if new and mesh.size > 1:
        order = CallOrder(mesh, program, fx.Graph(), signature_of(program))
        agree_on_groups(order, list(map(str, new)))
    for key in new:
        _group(mesh, key)
    made.update(new)


# The groups that each mesh has.
_made: dict[Mesh, set[tuple[Any, ...]]] = {}


def _group(mesh: Mesh, key: tuple[Any, ...]) -> Any:
    """The group of two coordinates along an axis, or that along several axes."""
    return mesh.group(key) if isinstance(key[1], str) else mesh.pair(*key)


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    layout = LAYOUT.get(node, ())
    return layout if isinstance(layout, tuple) else (layout,)


def _local_bytes(node: fx.Node, item: int, mesh: Mesh) -> int:
    """The bytes of the largest shard."""
    val: Any = VAL.get(node)
    layout = LAYOUT.get(node)
    if isinstance(val, (tuple, list)):
        if not isinstance(val[item], torch.Tensor):
            return 0
        val, layout = val[item], layout and layout[_among_tensors(val, item)]
    if not isinstance(val, torch.Tensor) or layout is None:
        return 0
    return int(layout.largest_local(mesh.shape)) * val.element_size()


def _among_tensors(values: Sequence[Any], item: int) -> int:
    """The index of an item among the tensors, which alone have layouts."""
    return sum(isinstance(value, torch.Tensor) for value in values[:item])


def _are_traced(parts: Sequence[torch.Tensor]) -> bool:
    """Whether parts are a transform's tensors, which have no values to compare yet."""
    if any(type(part) not in (torch.Tensor, torch.nn.Parameter) for part in parts):
        return True
    return internals.has_transforms() and any(map(internals.is_wrapped, parts))


def _local(lowering: Lowering) -> fx.Graph:
    graph = lowering.run()
    fold_views(graph)
    dense_rows(graph)
    return graph


def runtime_of(mesh: Mesh, check_replicated: bool = True) -> Runtime:
    """The runtime of a mesh."""
    return Simulated(mesh) if mesh.virtual else Distributed(mesh, check_replicated)
