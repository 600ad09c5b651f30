"""What users call the values of a plan: paths, labels, source lines, collectives that move them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from torch import fx

from torchard.functional.core.arguments import nearest
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import COLLECTIVE, LOOP, NAME, SCOPE, SOURCE, STEP, VAL
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.tags import BUCKET, MOVED
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.constraints import SpecHint
from torchard.sharding.planning.decision import Plan
from torchard.sharding.scheduling.collectives import Collective
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import spec_of

__all__ = ["PlanNames"]


class PlanNames:
    """The names of a plan's values.

    Args:
        specified: the inputs, or the constraints that are their specs, by the number of the input.
    """

    def __init__(self, program: Program, plan: Plan, specified: Mapping[fx.Node, int]) -> None:
        self.program, self.plan, self.specified = program, plan, specified
        self._homes = plan.decision.home

    def path(self, node: fx.Node) -> str:
        """The path of an input."""
        return self.program.inputs[self.specified[node]].path

    def called(self, node: fx.Node) -> str:
        """A value in messages: the path of an input; ``mm at model.py:12 in mlp``."""
        base = node
        while is_alias(base) and base.all_input_nodes[0] in self._homes:
            base = base.all_input_nodes[0]
        if base in self.specified:
            return self.path(base)
        source = SOURCE.get(node)
        return f"{op_name(node).removeprefix('aten.')}{f' at {source}' if source else ''}"

    def named(self, what: str) -> list[fx.Node]:
        """The values that a path, a label or a line names.

        Raises:
            ValueError: it names none.
        """
        each = self._paths, self._labels, self._lines
        for names in each:
            if what in names:
                return names[what]
        near = nearest(what, list(dict.fromkeys(name for names in each for name in names)), 4)
        raise ValueError(
            f"why: what={what!r} is no input, output, label or source line of "
            f"{self.program.name}; the nearest are {', '.join(map(repr, near))}."
        )

    def moved_by(self, record: Collective) -> tuple[list[fx.Node], bool]:
        """The values that a collective moves: several if it is merged; or the operation that sends it.

        Returns:
            The values, and whether they are moved: else their operations send the collective themselves.

        Raises:
            ValueError: it is not of this plan.
        """
        nodes = self.program.graph.nodes
        own = [node for node in nodes if _is_of(node, record)]
        buckets = {BUCKET.of(node) for node in own if BUCKET.on(node)}
        own += [node for node in nodes if BUCKET.get(node) in buckets]
        names = {MOVED.of(node) for node in own if MOVED.on(node)}
        if not names:
            raise ValueError(
                f"why: what={record} is no collective of the plan of {self.program.name}: it is not one "
                "of its .collectives, or it is sent between stages, which are not planned."
            )
        values = [node for node in self.plan.graph.nodes if node.name in names]
        return values, any(STEP.on(node) for node in own)

    def fixed_by(self, node: fx.Node, layout: Layout, mesh: Mesh) -> str:
        """What fixes the layout of an input or a constraint."""
        if node not in self.specified:
            return "constrain"
        leaf = self.program.inputs[self.specified[node]]
        if node.op != "placeholder" or leaf.tag is not None:
            return "its spec"
        hint, shape = leaf.hint(SpecHint), tuple(VAL.of(node).shape)
        used = hint is not None and hint.layout(shape, mesh, leaf.path) == layout
        return "its spec" if used else "the plain argument"

    def returned(self, node: fx.Node, home: Layout) -> str:
        """The layouts in which a value is returned, if they are others: ``, returned as out in P(),``."""
        values = zip(output_values(self.plan.graph), self.plan.decision.outputs, strict=True)
        each = zip(self.program.outputs, values, strict=True)
        found = [f"{leaf.path} in {spec_of(x)}" for leaf, (v, x) in each if v is node and x != home]
        return f", returned as {' and '.join(found)}," if found else ""

    @cached_property
    def _paths(self) -> dict[str, list[fx.Node]]:
        found = {self.path(node): [node] for node in self.specified}
        for leaf, value in zip(self.program.outputs, output_values(self.plan.graph), strict=True):
            found.setdefault(leaf.path, [value])
        return found

    @cached_property
    def _labels(self) -> dict[str, list[fx.Node]]:
        """The values by their labels, with and without the scope."""

        def names(node: fx.Node) -> Iterator[str]:
            if NAME.on(node):
                yield NAME.of(node)
                if scope := SCOPE.get(node):
                    yield f"{scope}/{NAME.of(node)}"

        return _by_name((node, names(node)) for node in self._values())

    @cached_property
    def _lines(self) -> dict[str, list[fx.Node]]:
        """The values of each line; views only if it computes nothing else."""

        def names(node: fx.Node) -> Iterator[str]:
            if source := SOURCE.get(node):
                yield from dict.fromkeys([source, source.partition(" in ")[0]])

        found = _by_name((node, names(node)) for node in self._values())
        computed = {line: [n for n in nodes if not is_alias(n)] for line, nodes in found.items()}
        return {line: computed[line] or nodes for line, nodes in found.items()}

    def _values(self) -> Iterator[fx.Node]:
        """The values that operations compute."""
        for node in self.plan.graph.nodes:
            if node.op == "call_function" and node in self._homes:
                yield node


def _by_name(named: Iterable[tuple[fx.Node, Iterable[str]]]) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node, names in named:
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def _is_of(node: fx.Node, record: Collective) -> bool:
    """Whether a node is a collective, or one iteration of it."""
    known = COLLECTIVE.get(node)
    if not isinstance(known, Collective):
        return False
    if known == record:
        return True
    loop = LOOP.get(node)
    return loop is not None and any(known.in_iteration(i) == record for i in loop.order())
