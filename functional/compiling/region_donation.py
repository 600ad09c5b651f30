"""Donation to compiled code: what a region may write its results over, and copies of what others hold."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from torchard.functional.compiling.regions import Region, Run
from torchard.functional.execution.sequencing import instructions_of
from torchard.functional.execution.storages import Allocation, Fresh, StorageGroup, StorageRun
from torchard.functional.programs.loops import regrouped

__all__ = ["donated_operands"]


def donated_operands(outer: fx.Graph, donated: Sequence[int]) -> dict[Run, list[int]]:
    """By the code of regions, the positions of the operands that it may write over, in each call of it.

    These are the program's donated inputs that nothing else refers to when the call begins.

    Args:
        outer: the graph that calls regions.
        donated: the positions of the program's donated inputs.
    """
    run = _RegionCalls(outer, donated)
    run.all(instructions_of(regrouped(outer)))
    return run.positions


class _RegionCalls(StorageRun):
    def __init__(self, outer: fx.Graph, donated: Sequence[int]) -> None:
        inputs = list(outer.find_nodes(op="placeholder"))
        super().__init__(inputs, donated, lambda node: Fresh(None, 0))
        self.positions: dict[Run, list[int]] = {}

    def computed(self, node: fx.Node, operands: Any, i: int | None) -> Any:
        """What a call returns; an operation that is no region may make views of all operands."""
        result: Any = None
        if isinstance(node.target, Region):
            self._called(node.target.run, operands.items)
        else:
            result = StorageGroup(list(operands))
        items = [int(str(user.args[1])) for user in node.users if user.target is operator.getitem]
        return StorageGroup([result] * (max(items) + 1)) if items else result

    def _called(self, run: Run, operands: Sequence[Any]) -> None:
        last = [
            position
            for position, storage in enumerate(operands)
            if isinstance(storage, Allocation)
            and (storage.kind, storage.references) == ("argument", 1)
        ]
        self.positions[run] = [n for n in self.positions.get(run, last) if n in last]
