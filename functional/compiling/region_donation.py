"""Donation to compiled code: what a region may write its results over, and copies of what others hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchard.functional.compiling.regions import Region, Run
from torchard.functional.execution.instructions import Compute, Instruction
from torchard.functional.execution.sequencing import what_runs
from torchard.functional.execution.storages import (
    Allocation,
    Fresh,
    StorageGroup,
    StorageRun,
    in_items,
)

__all__ = ["donated_operands"]


def donated_operands(outer: fx.Graph, donated: Sequence[int]) -> dict[Run, list[int]]:
    """By the code of regions, the positions of the operands that it may write over, in each call of it.

    These are the program's donated inputs that nothing else refers to when any of the calls begins. What
    a region writes into is copied otherwise, so that in some calls something else may refer to it, which
    is then copied before (`own`). So a loop writes into a cache that its iterations pass on in place.
    Rows of a donated stack are written, too, if what is written is stacked again (`reinplacing.py`).

    Args:
        outer: the graph that calls regions.
        donated: the positions of the program's donated inputs.
    """
    run = _RegionCalls(outer, donated)
    run.all(what_runs(outer, donated)[1].instructions)
    return run.positions


class _RegionCalls(StorageRun):
    def __init__(self, outer: fx.Graph, donated: Sequence[int]) -> None:
        inputs = list(outer.find_nodes(op="placeholder"))
        super().__init__(inputs, donated, lambda node: Fresh(None, 0))
        # What is written into and dead after some call, and the arguments that are after every call.
        self.written: dict[Run, set[int]] = {}
        self.arguments: dict[Run, set[int]] = {}

    def _one(self, instruction: Instruction, i: Any) -> None:
        if isinstance(instruction, Compute) and instruction.placed:
            region: Any = instruction.node.target
            written = self.written.setdefault(region.run, set())
            written.update(position for position, _ in instruction.placed)
        super()._one(instruction, i)

    def computed(self, node: fx.Node, operands: Any, i: int | None) -> Any:
        """What a call returns; an operation that is no region may make views of all operands."""
        region: Any = node.target
        if isinstance(region, Region):
            self._called(region, operands.items)
            at = len(self.live.order)
            self.live.order.append(node)
            results = [
                self._allocated(node, k, Fresh(None, 0), at, i) if fresh else None
                for k, fresh in enumerate(region.fresh)
            ]
            return StorageGroup(results)
        result = StorageGroup(list(operands))
        return in_items(node, lambda _: result)

    def _called(self, region: Region, operands: Sequence[Any]) -> None:
        last = {
            position: storage.kind
            for position, storage in enumerate(operands)
            if isinstance(storage, Allocation) and storage.references == 1
        }
        self.written.setdefault(region.run, set()).update(n for n in last if n in region.written)
        arguments = {n for n, kind in last.items() if kind == "argument"}
        self.arguments[region.run] = self.arguments.get(region.run, arguments) & arguments

    @property
    def positions(self) -> dict[Run, list[int]]:
        """By the code of regions, the positions."""
        return {run: sorted(written | self.arguments[run]) for run, written in self.written.items()}
