"""Binding: from a program to a callable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.graphs import without_garbage
from torchard.functional.programs.program import Bound, Program
from torchard.functional.updates.merging import with_updates

__all__ = ["BoundLater", "Compiling", "bind"]


class Compiling(ABC):
    """A bound program that a compiler compiles when it is first called."""

    def prepare(self, parts: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Compile what a call with these parts runs, as far as that can be known before it runs."""

    @abstractmethod
    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it."""


class BoundLater:
    """A bound program that is made when it is first called, since it may never be."""

    def __init__(self, make: Callable[[], Bound]) -> None:
        self._make = make

    @cached_property
    def _bound(self) -> Bound:
        with without_garbage():
            return self._make()

    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it."""
        return self._bound(parts)


def bind(program: Program) -> Bound:
    """A callable from all parts of all inputs, constants included, to all parts of all outputs.

    It may empty a list that it is given, so that inputs are freed after their last use, but not a tuple.
    """
    program = with_updates(program)
    if program.compiler is not None:
        return program.compiler.bind(program)
    if program.runtime is not None:
        return program.runtime.bind(program)
    return compiled(program.graph, program.name)
