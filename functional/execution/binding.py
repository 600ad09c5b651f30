"""Binding: from a program to a callable."""

from __future__ import annotations

from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.program import Bound, Program

__all__ = ["bind"]


def bind(program: Program) -> Bound:
    """A callable from all parts of all inputs, constants included, to all parts of all outputs.

    It may empty a list that it is given, so that inputs are freed after their last use, but not a tuple.
    """
    if program.compiler is not None:
        return program.compiler.bind(program)
    if program.runtime is not None:
        return program.runtime.bind(program)
    return compiled(program.graph, program.name)
