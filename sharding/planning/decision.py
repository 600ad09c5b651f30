"""The inputs of propagation, the decision it returns, and the cost of a decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from torchard.functional.costs.seconds import busy_seconds
from torchard.functional.machines.machine import Machine
from torchard.functional.machines.presets import PLANNING
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.iteration_space import points
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option
from torchard.sharding.layouts.tags import WEIGHT
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.manual_options import ManualConstraint
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = [
    "BATCH",
    "CONSTRAINT",
    "DERIVED",
    "PARAMETER",
    "Given",
    "LayoutDecision",
    "Plan",
    "Relation",
    "contested_axes",
    "gathered_axes",
    "seconds_per_point",
    "work_of",
]

BATCH, PARAMETER, CONSTRAINT, DERIVED = range(4)

Relation = Callable[[Layout, Sizes], Layout]
"""Of the layouts that a node may have, that nearest to another layout: to an allowed one, itself."""


@dataclass(frozen=True)
class Given:
    """The constraints that one propagation is given.

    Attributes:
        inputs: the layout and rank of each placeholder; for a cotangent, the index of its output.
        outputs: the layout that each output must have; None if any layout will do.
        unread: the layouts of plain inputs that nothing reads, of which only the shape may matter.
        constraints: the layout of each constraint node.
        ranks: the precedence of the shards that each constraint introduces.
        relative: for each constraint node that leaves a choice, the layouts that it may have. Rules take
            the nearest to that of its value (without pending sums); a minimum takes any.
        local: operations on local values (manual mode), and which of their options are excluded.
        spread: axes to restore wherever propagation would drop them (``stakes.py``).
        contested: axes along which parameters take precedence over other inputs, not the reverse.
        handed_first: whether a loop's carry is split as iterations hand it on, rather than as it begins,
            where costs do not tell.
        machine: the machine by whose rates plans are compared.
        on: the machine on which the plan is to take least time, however it is split; None: the plan by
            rules stays, unless another is better on any machine.
    """

    inputs: dict[fx.Node, tuple[Layout, int] | int]
    outputs: tuple[Layout | None, ...]
    unread: tuple[Layout, ...] = ()
    constraints: dict[fx.Node, Layout] = field(default_factory=dict)
    ranks: dict[fx.Node, int] = field(default_factory=dict)
    relative: dict[fx.Node, Relation] = field(default_factory=dict)
    local: dict[fx.Node, ManualConstraint] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()
    contested: frozenset[str] = frozenset()
    handed_first: bool = False
    machine: Machine = PLANNING
    on: Machine | None = None

    @property
    def target(self) -> Machine:
        """The machine whose seconds a minimum is of: that which is given, else that of comparisons."""
        return self.on or self.machine

    @property
    def splits_nothing(self) -> bool:
        """Whether every value is whole, so that each operation has one option."""
        free = self.relative or self.local or self.spread
        layouts = (*self.layouts_of_inputs, *filter(None, self.outputs), *self.constraints.values())
        return not free and all(layout.is_replicated for layout in layouts)

    @property
    def layouts_of_inputs(self) -> list[Layout]:
        """The layouts of all inputs but cotangents."""
        known = [known[0] for known in self.inputs.values() if not isinstance(known, int)]
        return [*known, *self.unread]

    @property
    def ranked_layouts(self) -> list[tuple[Layout, int]]:
        """The layouts and ranks of all inputs but cotangents, and of all constraints that fix one."""
        known = [known for known in self.inputs.values() if not isinstance(known, int)]
        return [*known, *((x, self.ranks[node]) for node, x in self.constraints.items())]

    def required(self, sizes: Sizes) -> dict[fx.Node, Layout]:
        """The layout of each constraint node that splits only what it requires to be split."""
        least = {
            node: nearest(Layout.replicated(tuple(VAL.of(node).shape)), sizes)
            for node, nearest in self.relative.items()
        }
        return self.constraints | least

    def split_axes(self, sizes: Sizes) -> frozenset[str]:
        """The axes that split an input, an output or a constraint."""
        layouts = (
            *self.layouts_of_inputs, *filter(None, self.outputs), *self.required(sizes).values()
        )
        return frozenset(a for layout in layouts for a in layout.split_axes)

    def planned_axes(self, sizes: Sizes) -> list[str]:
        """The axes of several ranks that split something that is given, in order; others stay idle."""
        split = self.split_axes(sizes)
        return [axis for axis, count in sizes if axis in split and count > 1]

    def rank(self, rank: int, axis: str) -> int:
        """The rank of an input's shards along an axis."""
        return DERIVED if rank == BATCH and axis in self.contested else rank


@dataclass
class LayoutDecision:
    """The result of propagation.

    Attributes:
        option: the option chosen for every operation.
        raw: the layouts of each operation's results as computed.
        home: the layout in which each value is available to its consumers: the layout in ``raw``, with
            pending sums resolved if several consumers need the value.
        kept: the layout into which a value whose home is given is moved, for all that do not read it at
            home.
        taken: the versions that are computed in the place of values' own (`minimum/alternatives.py`).
        outputs: the layout of each output.
        tied: whether costs did not tell how a loop's carry is split (``Given.handed_first``).
        bytes: bytes sent per rank.
        work: seconds that the busiest rank computes.
    """

    option: dict[fx.Node, Option] = field(default_factory=dict)
    raw: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    home: dict[fx.Node, Layout] = field(default_factory=dict)
    kept: dict[fx.Node, Layout] = field(default_factory=dict)
    taken: dict[fx.Node, fx.Node] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    tied: bool = False
    bytes: float = 0.0
    work: float = 0.0

    def raw_item(self, node: fx.Node) -> Layout | None:
        """The raw layout of the result that a ``getitem`` reads; None if the result is not a tensor."""
        if not hasattr(VAL.get(node), "shape"):
            return None
        return self.raw[node.all_input_nodes[0]][result_index(node)]

    def total(self, machine: Machine) -> float:
        """The cost by which plans are compared: the seconds of sending and of working."""
        return self.bytes / machine.link.bandwidth + self.work


@dataclass(frozen=True)
class Plan:
    """A global graph and the layout of every value in it."""

    graph: fx.Graph
    given: Given
    decision: LayoutDecision


def work_of(node: fx.Node, machine: Machine) -> float:
    """The seconds of an operation on one device of a machine."""
    return points(rule_of(Call.of(node)), (), ()) * _work_per_point(node, machine)


def seconds_per_point(node: fx.Node, machine: Machine) -> float:
    """The seconds that a plan counts for a point of an operation's iteration space: none of an alias."""
    return 0.0 if is_alias(node) else _work_per_point(node, machine)


def _work_per_point(node: fx.Node, machine: Machine) -> float:
    """The seconds per point of an operation's iteration space."""
    known, weight = WEIGHT.get(node, (None, 0.0))
    if known is not machine:
        weight = busy_seconds(node, machine) / max(points(rule_of(Call.of(node)), (), ()), 1)
        WEIGHT.set(node, (machine, weight))
    return weight


def gathered_axes(given: Given) -> frozenset[str]:
    """Axes that split both parameters and the rows of a batch: parameters are gathered along them."""
    return _beside_parameters(given, rows=True)


def contested_axes(given: Given) -> frozenset[str]:
    """Axes that split both parameters and an inner dim of another input."""
    return _beside_parameters(given, rows=False)


def _beside_parameters(given: Given, rows: bool) -> frozenset[str]:
    """Axes that split parameters, and the rows or an inner dim of a batch."""
    placed = given.ranked_layouts
    of_parameters = {a for layout, rank in placed if rank == PARAMETER for a in layout.split_axes}
    of_batch = {
        axis
        for layout, rank in placed
        if rank == BATCH
        for axis in layout.split_axes
        if (layout.dim_of(axis) == 0) == rows
    }
    return frozenset(of_parameters & of_batch)
