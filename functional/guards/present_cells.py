"""Functions as they are now: what their closures hold, whatever is assigned to the variables later."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.placed import is_placed

__all__ = ["copied", "is_filled", "with_present_cells"]


def with_present_cells(fn: Callable[..., Any], tensors: bool = True) -> Callable[..., Any]:
    """A copy of a function with cells of its own; so are functions that it closes over.

    A function that is traced in a Python loop may be run again, for a derivative, when the loop's
    variables have other values. What is no function is returned as it is.

    Args:
        tensors: whether to hold the tensors, too; without, variables with tensors are shared.
    """
    return _Copies(tensors).of(fn)  # type: ignore[no-any-return]


class _Copies:
    def __init__(self, tensors: bool) -> None:
        self.tensors = tensors
        self.known: dict[int, FunctionType] = {}  # functions may close over each other

    def of(self, value: Any) -> Any:
        if type(value) is not FunctionType or not value.__closure__:
            return value
        if id(value) in self.known:
            return self.known[id(value)]
        return copied(value, self.known, self.of, self._is_shared)

    def _is_shared(self, cell: CellType) -> bool:
        if self.tensors or not is_filled(cell):
            return False
        leaves = tree.leaves(cell.cell_contents)
        return any(isinstance(leaf, torch.Tensor) or is_placed(leaf) for leaf in leaves)


def copied(
    function: FunctionType,
    known: dict[int, FunctionType],
    find: Callable[[Any], Any],
    is_shared: Callable[[CellType], bool] = lambda cell: False,
) -> FunctionType:
    """A copy of a function, which has cells of its own.

    Args:
        known: the copies of functions, by the ids. The copy is among them before its cells are filled.
        find: what a cell of the copy contains, from what the function's contains.
        is_shared: whether the copy has this cell of the function itself.
    """
    before = function.__closure__ or ()
    cells = tuple(old if is_shared(old) else CellType() for old in before)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(copy).update(vars(function))
    known[id(function)] = copy
    for old, new in zip(before, cells, strict=True):
        if new is not old and is_filled(old):
            new.cell_contents = find(old.cell_contents)
    return copy


def is_filled(cell: CellType) -> bool:
    """Whether something has been assigned to a cell."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
