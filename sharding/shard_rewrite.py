"""The rewrite behind ``shard``: from a global program to an SPMD program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.scope_frames import Frame
from torchard.functional.loops.call import in_bodies
from torchard.functional.machines.machine import Machine
from torchard.functional.machines.presets import default
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.program import FREE, Leaf, Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import LAYOUT, NAME, PLAN, VAL
from torchard.functional.programs.unrolled import pattern_pass
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.tags import PRECEDENCE
from torchard.sharding.lowering.lower_manual import attach_moves
from torchard.sharding.lowering.plan_consistency import tell_failure
from torchard.sharding.lowering.runtime import runtime_of
from torchard.sharding.lowering.windows import attach_windows
from torchard.sharding.pipelining.homes import Home, home_of, locate, send_values
from torchard.sharding.planning.canonicalize import prepare
from torchard.sharding.planning.constraints import (
    SpecHint,
    check_named,
    constrain_named,
    constraint_layouts,
    constraint_rank,
    insert_constraint,
    matches,
    open_constraints,
    where_of,
)
from torchard.sharding.planning.decision import BATCH, DERIVED, PARAMETER, Given
from torchard.sharding.planning.manual_options import check_local, local_operations, may_leave_as
from torchard.sharding.planning.propagation.plan import warn_of_idle_axes
from torchard.sharding.planning.updates import after_backward, source_of, updated_inputs
from torchard.sharding.scheduling.added_sums import add_before_reducing
from torchard.sharding.scheduling.casts import send_narrowly
from torchard.sharding.scheduling.explained.report import reporter
from torchard.sharding.scheduling.gathers import layer_of
from torchard.sharding.scheduling.improved import improved_plan
from torchard.sharding.scheduling.partition import unpartition
from torchard.sharding.scheduling.precision import reduce_widely
from torchard.sharding.scheduling.schedule import Schedule, schedule
from torchard.sharding.values.axis_rules import Rules
from torchard.sharding.values.constrain import constrain, constraint_spec, number_of
from torchard.sharding.values.mesh import Mesh, MeshError, default_device
from torchard.sharding.values.placement import METHODS, MeshPlacement
from torchard.sharding.values.spec import P, SpecError, layout_of
from torchard.sharding.values.spectree import specs_of_arguments, specs_of_results

__all__ = ["Shard"]


class Shard(Rewrite):
    """The rewrite of a global program to an SPMD program; the arguments are those of `shard`."""

    def __init__(
        self,
        mesh: Mesh,
        in_specs: Any = None,
        out_specs: Any = None,
        constraints: tuple[tuple[str, P], ...] = (),
        check_replicated: bool = True,
        fn: Callable[..., Any] | None = None,
        rules: Rules | None = None,
        reduce_dtype: torch.dtype | None = None,
        schedule: Schedule | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.mesh, self.in_specs, self.out_specs = mesh, in_specs, out_specs
        self.sizes = tuple(size for _, size in mesh.sizes if size > 1)
        self.reduce_dtype, self.schedule = reduce_dtype, schedule or Schedule()
        self.machine, self.on = machine or default(default_device(mesh).type), machine
        self.check_replicated, self.warned = check_replicated, set[str]()
        self.constraints, self.fn, self.rules = constraints, fn, rules

    @property
    def passes(self) -> tuple[Pass, ...]:
        patterns = {f"constrain_at[{pattern!r}]": pattern for pattern, _ in self.constraints}
        planned = pattern_pass(Stage.PLAN, self, patterns, "have this spec")
        return planned, Pass(Stage.SCHEDULE, self.scheduled, reads_loops=True)

    def _key(self) -> tuple[Any, ...]:
        specs = tuple(None if s is None else id(s) for s in (self.in_specs, self.out_specs))
        settings = (self.check_replicated, self.rules, self.reduce_dtype, self.schedule, self.on)
        return self.mesh, specs, self.constraints, settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"shard({self.mesh})"

    def covers(self, other: Rewrite) -> bool:
        """Whether this rewrite also does what another one would do."""
        if isinstance(other, Shard) and other.mesh != self.mesh:
            raise MeshError(
                f"a value or an inner shard is on {other.mesh}, the enclosing shard on {self.mesh}; "
                "one program runs on one mesh. Use the same mesh, or call them one after the other."
            )
        return isinstance(other, Shard)

    def wants(self, node: fx.Node) -> bool:
        """Whether ``constrain_at`` constrains a value."""
        return NAME.on(node) and any(matches(node, pattern) for pattern, _ in self.constraints)

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A value, and its cotangent, which must not be split along a dim."""
        entries = [None if i == dim else P.UNCONSTRAINED for i in range(x.ndim)]
        return constrain(x, P(*entries))

    def failed(self, error: Exception) -> None:
        """Tell the other ranks of an error before the plan runs."""
        tell_failure(self.mesh, error)

    # -- the user's specs, leaf by leaf --------------------------------------------------------

    def annotate(self, program: Program) -> Program:
        """Check the specs against the function's own trees, and attach them to the leaves as hints."""
        for leaf in program.inputs:
            if isinstance(leaf.tag, MeshPlacement):
                _check_mesh(leaf, self.mesh)
        _check_devices(program, self.mesh)
        given = specs_of_arguments(program, self.in_specs, self.fn)
        wanted = specs_of_results(program, self.out_specs)
        errors: list[str] = []
        inputs = tuple(
            self._hinted(leaf, given.get(leaf.path), node, "in_specs", errors)
            for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        )
        outputs = tuple(
            self._hinted(leaf, wanted.get(leaf.path), node, "out_specs", errors)
            for leaf, node in zip(program.outputs, program.results, strict=True)
        )
        if errors:
            raise SpecError("\n".join(errors))
        return replace(program, inputs=inputs, outputs=outputs)

    def _hinted(
        self, leaf: Leaf, spec: P | None, node: fx.Node, which: str, errors: list[str]
    ) -> Leaf:
        """The leaf with its spec as a hint; an error is added to ``errors`` if the spec does not fit."""
        if spec is None:
            return leaf
        path = f"{which}: {leaf.path}"
        try:
            layout_of(spec, tuple(VAL.of(node).shape), self.mesh, path)
        except SpecError as error:
            errors.append(str(error))
        return leaf.hinted(SpecHint(spec))

    # -- the rewrite ---------------------------------------------------------------------------

    def __call__(self, program: Program) -> Program:
        """The SPMD program."""
        graph = unpartition(program.graph)
        if self._plans(program):
            self._constrain_inputs(graph, program, graph.find_nodes(op="placeholder"))
        check_named(self.constraints, constrain_named(graph, self.constraints))
        self._resolve_constraints(graph)
        if not self._plans(program):
            return replace(program, graph=graph)
        prepare(graph)
        plan, spmd = improved_plan(graph, self._given(program, graph), self.mesh)
        if self.on is None:  # on a given machine a plan repeats products only if that takes less time
            warn_of_idle_axes(plan, self.mesh, program.name, self.warned)
        PLAN.set(spmd.output_node(), reporter(plan, self.mesh))
        add_before_reducing(spmd)
        send_narrowly(spmd)
        given = plan.given.inputs.values()
        for node, known in zip(spmd.find_nodes(op="placeholder"), given, strict=True):
            if not isinstance(known, int):  # a cotangent has the layout of its output
                PRECEDENCE.set(node, known[1])
        locate(spmd, list(map(_home, program.inputs)))
        attach_moves(spmd, self.mesh)
        attach_windows(spmd, self.mesh)
        if self.reduce_dtype is not None:
            reduce_widely(spmd, self.reduce_dtype)
        homes = self._homes_of_results(program, graph, spmd)
        layouts = [x.homed(home) for x, home in zip(plan.decision.outputs, homes, strict=True)]
        outputs = self._outputs(program, layouts)
        inputs = tuple(
            replace(leaf, tag=outputs[leaf.of].tag)
            if leaf.role == "cotangent" and leaf.of is not None
            else leaf
            for leaf in program.inputs
        )
        runtime = runtime_of(self.mesh, self.check_replicated)
        return replace(program, graph=spmd, inputs=inputs, outputs=outputs, runtime=runtime)

    def _plans(self, program: Program) -> bool:
        """Whether it is the outermost shard of the stack; the others only constrain values."""
        outermost = next((r for r in reversed(program.stack) if isinstance(r, Shard)), self)
        outermost.covers(self)  # raises an error if it is on a different mesh
        return outermost is self

    def scheduled(self, program: Program) -> Program:
        """The program with its collectives scheduled and merged, in place."""
        if not self._plans(program):
            return program
        send_values(program.graph, list(map(_home, program.outputs)), self.mesh.sizes)
        layers: dict[fx.Node, str] = {}
        batch: set[str] = set()
        for leaf, node in zip(program.inputs, program.placeholders, strict=True):
            rank, layout = PRECEDENCE.get(node), LAYOUT.of(node)
            if (hint := leaf.hint(SpecHint)) is not None:  # a plain argument, which is split on entry
                layout = self._layout_of_hint(leaf, hint, node)
            if rank == PARAMETER:
                layers[node] = layer_of(leaf.path)
            elif rank == BATCH:
                batch |= set(layout.split_axes)
        schedule(program, self.schedule, layers, batch, self.machine, self.mesh.sizes)
        return program

    def inline(self, program: Program) -> Program:
        """The same global program, its specs as constraints, for an outer trace."""

        labels: dict[str, str] = {}

        def constrained(part: Program, outer: tuple[Frame, ...]) -> Program:
            part = part.copy()
            labels.update(constrain_named(part.graph, self.constraints, outer))
            self._resolve_constraints(part.graph)
            return part

        copied = program.copy()
        self._constrain_inputs(copied.graph, copied, copied.placeholders)
        self._constrain_outputs(copied.graph, copied)
        copied = in_bodies(copied, constrained)
        check_named(self.constraints, labels)
        plain = tuple(
            replace(leaf, tag=None) if leaf.tag is FREE else leaf for leaf in copied.outputs
        )
        rewrite = Shard(
            self.mesh,
            check_replicated=self.check_replicated,
            reduce_dtype=self.reduce_dtype,
            schedule=self.schedule,
            machine=self.on,
        )
        return replace(copied, outputs=plain, asks=(*copied.asks, rewrite))

    def _constrain_inputs(
        self, graph: fx.Graph, program: Program, placeholders: Sequence[fx.Node]
    ) -> None:
        last = placeholders[-1] if placeholders else None
        for leaf, node in zip(program.inputs, placeholders, strict=True):
            hint = leaf.hint(SpecHint)
            if hint is not None and leaf.role in ("primal", "closure", "tangent"):
                if not node.users or self._layout_of_hint(leaf, hint, node) == _tag_layout(leaf, node):
                    continue
                assert last is not None
                with graph.inserting_after(last):
                    insert_constraint(node, hint, leaf.path, soft=True)

    def _constrain_outputs(self, graph: fx.Graph, program: Program) -> None:
        out = graph.output_node()
        values = list(output_values(graph))
        last = graph.find_nodes(op="placeholder")[-1:]
        for i, leaf in enumerate(program.outputs):
            value, hint = values[i], leaf.hint(SpecHint)
            if hint is not None:
                # Before every other use of the value, all of which then read the constrained one.
                with graph.inserting_after(last[0] if value.op == "placeholder" else value):
                    values[i] = insert_constraint(value, hint, leaf.path, soft=False)
        out.args = (tuple(values),)

    def _resolve_constraints(self, graph: fx.Graph) -> None:
        """Replace names of dims in constraints by axes, according to the rules of this shard."""
        if self.rules is None:
            return
        for node in graph.nodes:
            spec = constraint_spec(node)
            if spec is not None:
                spec = self.rules.spec(spec, where_of(node))
                node.args = (node.args[0], number_of(spec))

    def _layout_of_hint(self, leaf: Leaf, hint: SpecHint, node: fx.Node) -> Layout:
        return hint.layout(tuple(VAL.of(node).shape), self.mesh, leaf.path).homed(())

    # -- the layouts that a plan is given ------------------------------------------------------

    def _given(self, program: Program, graph: fx.Graph) -> Given:
        """The layouts of inputs, outputs and constraints that the plan must keep to."""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        updated, stepped = updated_inputs(graph, program.outputs), after_backward(graph)
        parameters = set(updated.values())
        wanted = {leaf.of for leaf in program.outputs if leaf.role == "gradient"}
        inputs: dict[fx.Node, tuple[Layout, int] | int] = {}
        for i, (leaf, node) in enumerate(zip(program.inputs, placeholders, strict=True)):
            if leaf.role == "cotangent" and leaf.of is not None:
                inputs[node] = leaf.of
                continue
            rank = PARAMETER if i in wanted or node in parameters else BATCH
            hint = leaf.hint(SpecHint)
            if hint is not None and hint.spec.weak:
                rank = DERIVED
            inputs[node] = (_tag_layout(leaf, node), rank)
        leaves = dict(zip(placeholders, program.inputs, strict=True))
        unread = tuple(
            self._layout_of_hint(leaf, hint, node)
            for node, leaf in leaves.items()
            if leaf.role == "primal" and not node.users and (hint := leaf.hint(SpecHint)) is not None
        )
        outputs: list[Layout | None] = []
        for i, (leaf, value) in enumerate(zip(program.outputs, output_values(graph), strict=True)):
            layout = self._layout_of_result(leaf, value)
            if layout is None and i in updated:
                layout = self._layout_of_update(value, value in stepped, leaves[updated[i]], updated[i])
            outputs.append(None if layout is None else layout.homed(()))
        check_local(graph, program, self.mesh)
        constraints = constraint_layouts(graph, self.mesh)
        relative = open_constraints(graph, self.mesh)
        ranks = {n: constraint_rank(n, inputs) for n in (*constraints, *relative)}
        local = local_operations(graph)
        return Given(
            inputs, tuple(outputs), unread, constraints, ranks, relative, local=local, on=self.on
        )

    def _layout_of_result(self, leaf: Leaf, value: fx.Node) -> Layout | None:
        """The layout that an output must have; None if it is left to propagation."""
        shape = tuple(VAL.of(value).shape)
        if isinstance(leaf.tag, MeshPlacement):
            return leaf.tag.layout(shape)
        if leaf.tag is None or not shape:
            return Layout.replicated(shape)
        if (hint := leaf.hint(SpecHint)) is not None:
            return hint.layout(shape, self.mesh, leaf.path)
        return None

    def _layout_of_update(
        self, value: fx.Node, stepped: bool, given: Leaf, source: fx.Node
    ) -> Layout | None:
        """The layout of an input for its new value or its gradient; None if that is left to propagation.

        Args:
            value: the new value or the gradient.
            stepped: whether it is computed from gradients.
            given, source: the leaf of the input, and its placeholder.
        """
        layout = _tag_layout(given, source)
        hint = given.hint(SpecHint)
        if given.tag is None and hint is not None:  # a plain tensor, split by in_specs
            layout = self._layout_of_hint(given, hint, source)
        # The new value of a parameter that was placed as P() stays replicated.
        inherited = not layout.is_replicated or (stepped and isinstance(given.tag, MeshPlacement))
        return layout if inherited and may_leave_as(value, layout, self.mesh.sizes) else None

    def _homes_of_results(self, program: Program, graph: fx.Graph, spmd: fx.Graph) -> list[Home]:
        """The homes of the outputs: that of an input for its gradient and its new value."""
        held = dict(zip(graph.find_nodes(op="placeholder"), map(_home, program.inputs), strict=True))
        updated = updated_inputs(graph, program.outputs)
        homes: list[Home] = []
        for i, (leaf, value) in enumerate(zip(program.outputs, output_values(spmd), strict=True)):
            hint = leaf.hint(SpecHint)
            if leaf.tag is not FREE or not isinstance(value, fx.Node) or not VAL.of(value).ndim:
                homes.append(_home(leaf))
            elif hint is not None:
                homes.append(hint.spec.home)
            elif i in updated and held[updated[i]]:
                homes.append(held[updated[i]])
            else:
                homes.append(home_of(value))
        return homes

    def _outputs(self, program: Program, layouts: Sequence[Layout]) -> tuple[Leaf, ...]:
        """The leaves of the results, placed by their layouts."""
        tags = {n: leaf.tag for leaf, n in zip(program.inputs, program.placeholders, strict=True)}
        outputs = []
        for leaf, value, layout in zip(program.outputs, program.results, layouts, strict=True):
            if leaf.tag is FREE:
                held = MeshPlacement.of(self.mesh, layout)
                plain, hint = not layout.dims, leaf.hint(SpecHint)
                if not plain and hint is not None and hint.spec.is_replicated:
                    # The new value of an argument that was placed as P() stays a MeshTensor.
                    source = source_of(value)
                    plain = source is None or tags[source] != held
                leaf = replace(leaf, tag=None if plain else held)
            outputs.append(leaf)
        return tuple(outputs)


def _home(leaf: Leaf) -> Home:
    """The home of an input or output."""
    return leaf.tag.home if isinstance(leaf.tag, MeshPlacement) else ()


def _check_mesh(leaf: Leaf, mesh: Mesh) -> None:
    assert isinstance(leaf.tag, MeshPlacement)
    if leaf.tag.mesh != mesh:
        raise MeshError(
            f"{leaf.path} is on {leaf.tag.mesh}, but the enclosing shard runs on {mesh}. Place it on "
            "that mesh (place(x.full(), mesh, spec)), or shard the function on its own."
        )


def _check_devices(program: Program, mesh: Mesh) -> None:
    """Raise MeshError unless all values of a program are on the mesh's type of device."""
    kinds: dict[str, str] = {}
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        val = VAL.of(node)
        if val.ndim and val.device.type != "meta":
            kinds.setdefault(val.device.type, leaf.path)
    want = default_device(mesh).type if not mesh.virtual else next(iter(kinds), None)
    for kind, path in kinds.items():
        if kind != want:
            others = next((f" and {p} is on {k}" for k, p in kinds.items() if k != kind), "")
            raise MeshError(
                f"{path} is on {kind}{others}; {mesh} runs on {want}. Move it there with "
                f".to({want!r}) before the call."
            )


def _tag_layout(leaf: Leaf, node: fx.Node) -> Layout:
    """The layout of an input by its placement, wherever it is; a plain tensor is replicated."""
    shape = tuple(VAL.of(node).shape)
    if isinstance(leaf.tag, MeshPlacement):
        return leaf.tag.layout(shape).homed(())
    return Layout.replicated(shape)


METHODS.rewrite = Shard
