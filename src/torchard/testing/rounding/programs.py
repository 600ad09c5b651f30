"""The straight-line program of a call, whose operations can be run again with other roundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchard.functional.loops.rolled import straight_line
from torchard.functional.programs.program import Program
from torchard.functional.trace import trace
from torchard.functional.tracing.signature import read

__all__ = ["program_of"]


def program_of(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Program, list[Any]]:
    """The program of a call over plain tensors, and its inputs."""
    program = straight_line(trace(fn)(*args))
    values = read(tuple(args), {}).values
    return program, [*values, *(c.value for c in program.closures), *program.constants]
