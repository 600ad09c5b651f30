"""Binding: from a program to a callable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.program import Bound, Program
from torchard.functional.updates.merging import with_updates

__all__ = ["Compiling", "bind"]


class Compiling(ABC):
    """A bound program that a compiler compiles when it is first called."""

    def prepare(self, parts: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Compile what a call with these parts runs, as far as that can be known before it runs."""

    @abstractmethod
    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it."""


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
