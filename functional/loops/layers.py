"""Layers that become a loop, and where each operand of a layer comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import fx

from torchard.functional.torch_internals.operators import aten

__all__ = [
    "Carry",
    "Entered",
    "EqualLayers",
    "Inside",
    "LayerSum",
    "Listed",
    "SameRow",
    "Shared",
    "Source",
    "operands_of",
    "owners",
]


@dataclass(frozen=True)
class Inside:
    """A value of the layer itself."""

    operation: int


@dataclass(frozen=True)
class Carry:
    """A value of the layer before; for the first layer another."""

    operation: int
    first: fx.Node


@dataclass(frozen=True)
class Shared:
    """One value for all layers."""

    value: fx.Node


@dataclass(frozen=True)
class SameRow:
    """A value of the same row of other layers."""

    layers: EqualLayers
    operation: int


@dataclass(frozen=True)
class Entered:
    """The operand that enters the same row of other layers."""

    layers: EqualLayers
    carry: Carry


@dataclass(frozen=True)
class Listed:
    """A value for each row."""

    values: tuple[fx.Node, ...]


@dataclass(frozen=True)
class LayerSum:
    """A sum over the layers of what one of their operations computes, added to another value."""

    first: fx.Node
    term: int


Source = Inside | Carry | Shared | SameRow | Entered | Listed


@dataclass(eq=False)
class EqualLayers:
    """Equal layers.

    Attributes:
        nodes: the operations of each layer, in the order in which they run.
        reverse: whether the layer of the last row runs first.
        sources: the origins of the operands of a layer's operations.
    """

    nodes: list[list[fx.Node]]
    reverse: bool = False
    sources: list[list[Source]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = {n: (i, j) for i, layer in enumerate(self.nodes) for j, n in enumerate(layer)}

    @property
    def count(self) -> int:
        return len(self.nodes)

    def turn(self, row: int) -> int:
        """Which layer of those in order has a row; and the row of a layer."""
        return self.count - 1 - row if self.reverse else row

    def by_row(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What there is for each layer in order, for each row."""
        return tuple(values[self.turn(row)] for row in range(self.count))

    def hands_on(self, operation: int) -> bool:
        """Whether a layer hands the result of an operation to the next."""
        return any(carry.operation == operation for carry in self.carries)

    @cached_property
    def carries(self) -> list[Carry]:
        """What a layer hands to the next, each once, but for sums."""
        own = (source for sources in self.sources for source in sources)
        carries = dict.fromkeys(source for source in own if isinstance(source, Carry))
        return [carry for carry in carries if carry.operation not in self.sums]

    @cached_property
    def sums(self) -> dict[int, LayerSum]:
        """The operations that add a term of each layer to a sum that nothing else reads, by number."""
        sums = ((j, self._sum(j, sources)) for j, sources in enumerate(self.sources))
        return {j: found for j, found in sums if found is not None}

    def _sum(self, operation: int, sources: Sequence[Source]) -> LayerSum | None:
        column = [layer[operation] for layer in self.nodes]
        carries = [source for source in sources if isinstance(source, Carry)]
        terms = [source for source in sources if isinstance(source, Inside)]
        alone = all(list(node.users) == [after] for node, after in pairwise(column))
        if column[0].target is not aten.add.Tensor or column[0].kwargs or not alone:
            return None
        if len(carries) != 1 or len(terms) != 1 or carries[0].operation != operation:
            return None
        read_inside = any(user in self.place for user in column[-1].users)
        return None if read_inside else LayerSum(carries[0].first, terms[0].operation)


def owners(loops: Iterable[EqualLayers]) -> dict[fx.Node, EqualLayers]:
    """For each operation of some layers, which they are."""
    return {node: layers for layers in loops for node in layers.place}


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The operands of a node as they stand in its arguments, repeated ones too."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands
