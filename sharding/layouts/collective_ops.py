"""Collective operations, which exchange local values between the ranks along some mesh axes.

A reshard is a sequence of them (``reshard.py``), the collectives of manual mode are lowered to them
(``manual_collectives.py``), and a transport has a method for each (`CollectiveVisitor`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "CollectiveOp",
    "CollectiveVisitor",
    "LocalSlice",
    "Ppermute",
    "PsumScatter",
    "Send",
    "SubDim",
]

T = TypeVar("T")
SubDim = tuple[int, int]  # a dim, and the index of one of its sub-dims


@dataclass(frozen=True)
class CollectiveOp(ABC):
    """A collective over some mesh axes, the first outermost.

    Attributes:
        kind: its name in plans, messages and traces.
        sends: whether anything crosses the network.
        reduction: "sum", "max" or "min"; None if it does not reduce.
    """

    axes: tuple[str, ...]
    kind: ClassVar[str]
    sends: ClassVar[bool] = True

    @property
    def reduction(self) -> str | None:
        return None

    @abstractmethod
    def elements(self, before: int, after: int, ranks: int) -> float:
        """The number of elements that a rank sends (and receives) under the ring algorithm.

        Args:
            before, after: the numbers of elements of its operand and its result.
            ranks: the number of ranks along the axes.
        """

    @abstractmethod
    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        """Call the visitor's method for this operation."""


@dataclass(frozen=True)
class AllReduce(CollectiveOp):
    """Every rank gets the sum (or the maximum or minimum) of the ranks' values."""

    reduction: str = "sum"
    kind = "all_reduce"

    def elements(self, before: int, after: int, ranks: int) -> float:
        return 2.0 * before * (ranks - 1) / ranks

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.all_reduce(self)


@dataclass(frozen=True)
class PsumScatter(CollectiveOp):
    """Every rank gets its slice along ``to`` of the result that an all_reduce would have."""

    to: SubDim
    reduction: str = "sum"
    kind = "psum_scatter"

    def elements(self, before: int, after: int, ranks: int) -> float:
        return float(after * (ranks - 1))

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.psum_scatter(self)


@dataclass(frozen=True)
class AllGather(CollectiveOp):
    """Every rank gets the ranks' values, concatenated along ``at``."""

    at: SubDim
    kind = "all_gather"

    def elements(self, before: int, after: int, ranks: int) -> float:
        return float(before * (ranks - 1))

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.all_gather(self)


@dataclass(frozen=True)
class AllToAll(CollectiveOp):
    """Every rank gets its slice along ``to`` of each rank's value, concatenated along ``at``."""

    at: SubDim
    to: SubDim
    kind = "all_to_all"

    def elements(self, before: int, after: int, ranks: int) -> float:
        return before * (ranks - 1) / ranks

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.all_to_all(self)


@dataclass(frozen=True)
class Ppermute(CollectiveOp):
    """For each (source, target) pair of positions, target gets source's value; other ranks get zeros."""

    pairs: tuple[tuple[int, int], ...]
    kind = "ppermute"

    def elements(self, before: int, after: int, ranks: int) -> float:
        return float(before) if ranks > 1 else 0.0

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.ppermute(self)


@dataclass(frozen=True)
class LocalSlice(CollectiveOp):
    """Every rank keeps its slice along ``to`` of a value that all ranks hold; nothing is sent."""

    to: SubDim
    kind, sends = "slice", False

    def elements(self, before: int, after: int, ranks: int) -> float:
        return 0.0

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.slice(self)


@dataclass(frozen=True)
class Send(CollectiveOp):
    """The ranks at coordinate ``to`` of the axis get the value that those at ``source`` have.

    ``to`` None: all other ranks along the axis. ``source`` None: all have it, nothing is sent, and those
    at ``to`` keep it.
    """

    source: int | None
    to: int | None
    kind = "send"

    @property
    def sends(self) -> bool:  # type: ignore[override]
        return self.source is not None

    def elements(self, before: int, after: int, ranks: int) -> float:
        return float(before) if self.sends else 0.0

    def accept(self, visitor: CollectiveVisitor[T]) -> T:
        return visitor.send(self)


class CollectiveVisitor(ABC, Generic[T]):
    """One method for each collective operation, all of them required."""

    @abstractmethod
    def all_reduce(self, op: AllReduce) -> T: ...

    @abstractmethod
    def psum_scatter(self, op: PsumScatter) -> T: ...

    @abstractmethod
    def all_gather(self, op: AllGather) -> T: ...

    @abstractmethod
    def all_to_all(self, op: AllToAll) -> T: ...

    @abstractmethod
    def ppermute(self, op: Ppermute) -> T: ...

    @abstractmethod
    def slice(self, op: LocalSlice) -> T: ...

    @abstractmethod
    def send(self, op: Send) -> T: ...
