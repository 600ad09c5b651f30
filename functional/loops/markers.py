"""What enters an iteration of a loop and leaves it, in a rolled program.

A node in a loop is tagged with it. Its operands are values of the same iteration, of the same iteration of
another loop with as many (by the index of the row, whatever the order), or of no loop: the same for all.
These functions say everything else. As operations on the values of one iteration they are simple; what
runs is code with a loop (execution/codegen.py), or the unrolled program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torchard.functional.programs.tagging import Tag, declare

__all__ = ["LOOP", "Loop", "again", "enter", "leave", "row", "rows", "total"]


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop of a rolled program, compared by identity.

    Attributes:
        count: the number of iterations.
        reverse: whether the iteration of the last row runs first.
        name: the name of the body.
    """

    count: int
    reverse: bool
    name: str

    def order(self) -> range:
        """The rows of the iterations, in the order in which they run."""
        rows = range(self.count)
        return rows[::-1] if self.reverse else rows


LOOP: Tag[Loop] = declare(
    "loop",
    "the loop in whose iterations the operation runs, in a rolled program",
    written_by="loops/rolled",
    read_by="many",
    follows="place",
)


def enter(value: torch.Tensor) -> torch.Tensor:
    """In a loop: the operand in the first iteration, then what `again` handed on."""
    return value


def again(value: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
    """In a loop: hand a value to the next iteration, as its `enter`."""
    return value


# Whether or not the last value is read, the next iteration reads what this one hands on.
fx.has_side_effect(again)


def row(stacked: torch.Tensor) -> torch.Tensor:
    """In a loop: the row of the iteration."""
    return stacked[0]


def leave(value: torch.Tensor) -> torch.Tensor:
    """After a loop: what `again` handed on last."""
    return value


def rows(value: torch.Tensor, count: int) -> torch.Tensor:
    """After a loop: the values of all its iterations, stacked."""
    return value.unsqueeze(0).expand(count, *value.shape)


def total(value: torch.Tensor) -> torch.Tensor:
    """After a loop: the sum over all its iterations."""
    return value
