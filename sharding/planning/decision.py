"""The inputs of propagation, the decision it returns, and the cost of a decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from torchard.functional.programs.flops import flops, is_product
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.iteration_space import points
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option
from torchard.sharding.layouts.tags import WEIGHT
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
    "work_of",
    "work_per_point",
]

BATCH, PARAMETER, CONSTRAINT, DERIVED = range(4)
_WORK_PER_BYTE = 32.0


@dataclass(frozen=True)
class Given:
    """The constraints that one propagation is given.

    Attributes:
        inputs: the layout and rank of each placeholder; for a cotangent, the index of its output.
        outputs: the layout that each output must have; None if any layout will do.
        constraints: the layout of each constraint node.
        ranks: the precedence of the shards that each constraint introduces.
        relative: the layout of each constraint node that depends on that of its value (without pending
            sums), given the mesh.
        local: operations on local values (manual mode), and which of their options are excluded.
        spread: axes to restore wherever propagation would drop them (``stakes.py``).
        contested: axes along which parameters take precedence over other inputs, not the reverse.
    """

    inputs: dict[fx.Node, tuple[Layout, int] | int]
    outputs: tuple[Layout | None, ...]
    constraints: dict[fx.Node, Layout] = field(default_factory=dict)
    ranks: dict[fx.Node, int] = field(default_factory=dict)
    relative: dict[fx.Node, Callable[[Layout, Sizes], Layout]] = field(default_factory=dict)
    local: dict[fx.Node, ManualConstraint] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()
    contested: frozenset[str] = frozenset()

    @property
    def splits_nothing(self) -> bool:
        """Whether every value is whole, so that each operation has one option."""
        layouts = [known[0] for known in self.inputs.values() if not isinstance(known, int)]
        layouts += [*filter(None, self.outputs), *self.constraints.values()]
        free = self.relative or self.local or self.spread
        return not free and all(layout.is_replicated for layout in layouts)

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
        outputs: the layout of each output.
        bytes: bytes sent per rank.
        work: the busiest rank's work: multiplications in products, plus elements that all other
            operations touch.
    """

    option: dict[fx.Node, Option] = field(default_factory=dict)
    raw: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    home: dict[fx.Node, Layout] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    bytes: float = 0.0
    work: float = 0.0

    def raw_item(self, node: fx.Node) -> Layout | None:
        """The raw layout of the result that a ``getitem`` reads; None if the result is not a tensor."""
        if not hasattr(VAL.get(node), "shape"):
            return None
        return self.raw[node.all_input_nodes[0]][result_index(node)]

    @property
    def total(self) -> float:
        """The cost by which plans are compared, in bytes."""
        return self.bytes + self.work / _WORK_PER_BYTE


def work_of(node: fx.Node) -> float:
    """The work of an operation on one device, in the unit of ``LayoutDecision.work``."""
    return points(rule_of(Call.of(node)), (), ()) * work_per_point(node)


def work_per_point(node: fx.Node) -> float:
    """Work per point. A product's work is its multiplications; other operations touch their largest
    tensor once.

    For an operation in a loop, the work of all iterations counts.
    """
    weight = WEIGHT.get(node)
    if weight is None:
        work = flops(node) / (2 if is_product(node) else 1) * times(node)
        weight = work / max(points(rule_of(Call.of(node)), (), ()), 1)
        WEIGHT.set(node, weight)
    return float(weight)
