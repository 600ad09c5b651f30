"""Lowered: a program as `trace` and ``f.lower(...)`` show it, with every report there is of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Bound, Program
from torchard.functional.programs.records import Work
from torchard.functional.remat.liveness import liveness
from torchard.functional.reports.draw import draw
from torchard.functional.reports.residuals import Residuals, residuals_of
from torchard.functional.reports.text import program_text
from torchard.functional.reports.work import work_of

__all__ = ["Lowered"]


@dataclass
class Lowered(Program):
    """A Program and its reports, which look at it and change nothing. Its ``str`` is its code.

    Attributes:
        joint: makes the program of its outputs and gradients, if it has no backward of its own.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Lowered
    >>> program = ta.trace(lambda x: x.sin().sum())(torch.ones(4))
    >>> isinstance(program, Lowered)
    True
    >>> program.peak, program.work.flops
    (36, 8)
    """

    joint: Callable[[], Program] | None = None

    @staticmethod
    def of(program: Program, joint: Callable[[], Program] | None = None) -> Lowered:
        """The same program, its graph and facts shared."""
        shared = {field.name: getattr(program, field.name) for field in fields(Program)}
        return Lowered(**shared, joint=joint)

    @property
    def residuals(self) -> Residuals:
        """What the backward reads of the forward: of the gradients taken inside, else of its own."""
        return residuals_of(self, self.joint)

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once while it runs, arguments and results among them.

        Of a joint program, during its forward and then its backward. Over a mesh, on the rank that
        holds most, buffers of collectives not counted.
        """
        return liveness(self).peak

    @property
    def work(self) -> Work:
        """FLOPs and bytes of one device and of the busiest rank, and how much each axis splits."""
        return work_of(self)

    def __str__(self) -> str:
        return program_text(self)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the program: layers, what flows between them, collectives with their bytes.

        Args:
            path: of the file, whose suffix (svg, pdf, png) is the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return draw(self, path)

    def bind(self) -> Bound:
        """A callable on all parts of all inputs, constants included, to all parts of all outputs.

        It may empty the list it is given, so that what dies inside is freed; a tuple is left alone.
        """
        return bind(self)
