"""Functions as they are now: what their closures hold, whatever is assigned to the variables later."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.placed import is_placed

__all__ = ["with_present_cells"]


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
        cells = tuple(old if self._is_shared(old) else CellType() for old in value.__closure__)
        copy = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        copy.__kwdefaults__, copy.__qualname__ = value.__kwdefaults__, value.__qualname__
        copy.__dict__.update(value.__dict__)
        self.known[id(value)] = copy
        for old, new in zip(value.__closure__, cells, strict=True):
            if new is not old and _is_filled(old):
                new.cell_contents = self.of(old.cell_contents)
        return copy

    def _is_shared(self, cell: CellType) -> bool:
        if self.tensors or not _is_filled(cell):
            return False
        leaves = tree.leaves(cell.cell_contents)
        return any(isinstance(leaf, torch.Tensor) or is_placed(leaf) for leaf in leaves)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # not assigned yet
        return False
    return True
