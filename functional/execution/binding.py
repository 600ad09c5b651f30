"""From a program to something that runs."""

from __future__ import annotations

from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.program import Bound, Program

__all__ = ["bind"]


def bind(program: Program) -> Bound:
    """A callable on all parts of all inputs, constants included, to all parts of all outputs.

    It may empty the list it is given, so that what dies inside is freed; a tuple is left alone.
    """
    if program.compiler is not None:
        return program.compiler.bind(program)
    if program.runtime is not None:
        return program.runtime.bind(program)
    return compiled(program.graph, program.name)
