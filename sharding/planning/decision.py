"""What propagation is given, what it decides, and what a decision costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from torchard.functional.programs.flops import flops, is_product
from torchard.sharding.layouts.iteration_space import points
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.options import Option
from torchard.sharding.layouts.tags import WEIGHT
from torchard.sharding.planning.manual_options import ManualConstraint
from torchard.sharding.rules import Call, rule_of

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
    """What is fixed from outside.

    Attributes:
        inputs: the layout and rank of each placeholder; of a cotangent, the index of its output.
        outputs: the layout each output must have; None leaves it open.
        pins: the layouts that constraints give their nodes.
        ranks: of the shards that pins make.
        local: operations on local values (manual mode), and what of them is not to be chosen.
        spread: axes to be brought back wherever they were lost (``stakes.py``).
    """

    inputs: dict[fx.Node, tuple[Layout, int] | int]
    outputs: tuple[Layout | None, ...]
    pins: dict[fx.Node, Layout] = field(default_factory=dict)
    ranks: dict[fx.Node, int] = field(default_factory=dict)
    local: dict[fx.Node, ManualConstraint] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()


@dataclass
class LayoutDecision:
    """What propagation found.

    Attributes:
        option: for every operation.
        raw: the layouts of its results as computed.
        home: the layout of each value where its consumers find it (``raw``, its pending sums
            resolved if several want them).
        outputs: the layout of each output.
        bytes: on the wire per rank.
        work: multiplications of products, and elements that all else touches, on the busiest rank.
    """

    option: dict[fx.Node, Option] = field(default_factory=dict)
    raw: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    home: dict[fx.Node, Layout] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    bytes: float = 0.0
    work: float = 0.0

    @property
    def total(self) -> float:
        """What plans are compared by, in bytes."""
        return self.bytes + self.work / _WORK_PER_BYTE


def work_of(node: fx.Node) -> float:
    """The work of an operation on one device, as ``LayoutDecision.work`` counts it."""
    return points(rule_of(Call.of(node)), (), ()) * work_per_point(node)


def work_per_point(node: fx.Node) -> float:
    """Work per point: multiplications of a product, where others touch their largest tensor once."""
    weight = WEIGHT.get(node)
    if weight is None:
        work = flops(node) / (2 if is_product(node) else 1)
        weight = work / max(points(rule_of(Call.of(node)), (), ()), 1)
        WEIGHT.set(node, weight)
    return float(weight)
