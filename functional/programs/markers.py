"""Loops in a graph: which operations are in which loop, what enters an iteration, and what leaves it.

A node in a loop is tagged with it. Its operands are values of the same iteration, of the same iteration
of another loop with as many (by the index of the row, whatever the order), or of no loop: the same for
all. These functions say everything else; `chosen` is what a conditional becomes, in a loop or not, and
`Effect` a call of a Python function, in the order of tokens. As operations on the values of one iteration
they are simple; what runs is code with a loop (execution/loop_code.py), or the unrolled program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import TensorSpec

__all__ = [
    "COLLECTORS",
    "Effect",
    "Iteration",
    "Loop",
    "PureCall",
    "after",
    "again",
    "chosen",
    "enter",
    "first",
    "goes_on",
    "is_marker",
    "item",
    "leave",
    "listed",
    "row",
    "rows",
    "taken",
    "tells_apart",
    "total",
]


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop of a rolled program, compared by identity.

    Attributes:
        count: the number of iterations.
        reverse: whether the iteration of the last row runs first.
        name: the name of the body.
        first: the first of its rows, which are not 0 to n - 1 if the loop was split in two.
        outside: how many frames the loop is in; those of an enclosing loop are not numbered by it.
        is_open: whether it runs as long as `goes_on` says so; costs are then those of one iteration.
    """

    count: int
    reverse: bool
    name: str
    first: int = 0
    outside: int = 0
    is_open: bool = False

    @property
    def span(self) -> range:
        """Its rows, one for each iteration."""
        return range(self.first, self.first + self.count)

    def order(self) -> range:
        """The rows of the iterations, in the order in which they run."""
        return self.span[::-1] if self.reverse else self.span


@dataclass(frozen=True)
class Iteration:
    """The operation of a rolled program from which an unrolled program's operation comes.

    Attributes:
        operation: its number among the operations of loops.
        scope: the scope around all iterations.
        count: the number of iterations.
    """

    operation: int
    scope: str
    count: int


def enter(value: torch.Tensor) -> torch.Tensor:
    """In a loop: the operand in the first iteration, then what `again` handed on."""
    return value


def again(value: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
    """In a loop: hand a value to the next iteration, as its `enter`."""
    return value


# Even if the last value is not read, the next iteration reads the value of this iteration.
fx.has_side_effect(again)


def goes_on(entered: torch.Tensor) -> torch.Tensor:
    """In an open loop: whether there is an iteration, by the 0-d bool that enters it."""
    return entered


fx.has_side_effect(goes_on)


def listed(values: list[torch.Tensor]) -> torch.Tensor:
    """Before a loop: a value for each row. They are not stacked: only `row` reads it."""
    return torch.stack(values)


def row(stacked: torch.Tensor) -> torch.Tensor:
    """In a loop: the row of the iteration."""
    return stacked[0]


# To read a row again is as free as a view.
row.is_view = True  # type: ignore[attr-defined]  # torchard's mark


@dataclass(frozen=True, eq=False)
class Effect:
    """A call with values, for its effect: it takes a token and the values, and returns a token, results.

    Attributes:
        name: what it is, in the text of programs.
        perform: receives the values, and returns the results.
        run: runs it under any transform, or records it; set by whoever makes it (callbacks/effect.py).
        results: what it returns.
        where: the line of the user's code.
        everywhere: whether each rank of a mesh performs it, and not one for all.
    """

    name: str
    perform: Callable[..., Any]
    run: Callable[..., tuple[torch.Tensor, ...]]
    results: tuple[TensorSpec, ...] = ()
    where: str = ""
    everywhere: bool = False

    namespace = "torchard"

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, token: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Perform it, or record it in the trace in progress."""
        return self.run(self, values, token)


@dataclass(frozen=True, eq=False)
class PureCall:
    """A call of an opaque function of tensors, without effects.

    Attributes:
        function: the function.
        run: calls it under any transform, or records it; set by whoever makes it (callbacks/pure.py).
        results: the specs of its results.
        vectorized: whether it takes the examples of a vmap at once, along dim 0.
        where: the line of the user's code.
    """

    function: Callable[..., Any]
    run: Callable[..., tuple[torch.Tensor, ...]]
    results: tuple[TensorSpec, ...]
    vectorized: bool
    where: str

    namespace = "torchard"
    __name__ = "pure_callback"

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call it, or record the call in the trace in progress."""
        return self.run(self, values)


def first() -> torch.Tensor:
    """The token before a program's first effect."""
    return torch.zeros((), dtype=torch.bool)


def after(value: torch.Tensor, token: torch.Tensor, of_gradients: bool) -> torch.Tensor:
    """A result of a program, which has it after the effect whose token this is.

    Args:
        of_gradients: whether the effect is that of a gradient which the program takes.
    """
    return value


after.is_view = True  # type: ignore[attr-defined]  # torchard's mark


def leave(value: torch.Tensor) -> torch.Tensor:
    """After a loop: what `again` handed on last."""
    return value


def rows(value: torch.Tensor, count: int, *others: torch.Tensor) -> torch.Tensor:
    """After a loop: the values of all its iterations, stacked; after a split one, of all its parts'."""
    return value.unsqueeze(0).expand(count, *value.shape)


def item(values: torch.Tensor, index: int) -> torch.Tensor:
    """After a loop: one of the `rows`, which are not stacked if only items are read."""
    return values[index]


def total(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """After a loop: the sum over all its iterations; after a split one, over all its parts'."""
    return value


def chosen(index: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """The value of an index, 0-d int64, among values of the same shapes and dtypes.

    As an operation it is pointwise in each of them. What only one of them depends on need not be computed
    unless it is selected (execution/choices.py).
    """
    return values[taken(index)].clone(memory_format=torch.contiguous_format)


def taken(index: torch.Tensor) -> int:
    """The value of an index; 0 for a tensor without data, of which the values are all alike.

    Raises:
        PurityError: a tracer other than this library's records what runs.
    """
    if not isinstance(index, internals.FakeTensor):
        return int(index)
    if internals.records_operations():
        raise PurityError(
            "a conditional is run under a tracer that is not torchard's, which would record one branch: "
            "trace the function that calls it with torchard.trace, or take the conditional out of it."
        )
    return 0


def is_marker(node: fx.Node) -> bool:
    """Whether a node computes nothing, but says what enters a loop or leaves it."""
    return node.target in _MARKERS


_MARKERS = (enter, again, goes_on, listed, row, leave, rows, item, total)
# Markers that read values of all iterations, or of the last iteration, after a loop.
COLLECTORS = (leave, rows, total)


def tells_apart(patterns: Iterable[Any] | None) -> bool:
    """Whether patterns over scopes may select some iterations of a loop and not others."""
    return any(
        not isinstance(pattern, str) or any(c.isdigit() or c in "[?" for c in pattern)
        for pattern in patterns or ()
    )
