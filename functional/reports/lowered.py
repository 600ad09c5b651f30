"""Lowered: a program as `trace` and ``f.lower(...)`` return it, with all reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchard.functional.core.arguments import checked
from torchard.functional.execution.binding import bind
from torchard.functional.execution.sequencing import RankList
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Bound, Program
from torchard.functional.programs.records import Work
from torchard.functional.programs.tags import PLAN, SCHEDULE
from torchard.functional.programs.unrolled import unrolled
from torchard.functional.remat.liveness import lists_of, peak_of
from torchard.functional.reports.draw import draw
from torchard.functional.reports.memory import Memory, memory_of
from torchard.functional.reports.residuals import Residuals, residuals_of
from torchard.functional.reports.text import program_text
from torchard.functional.reports.time import Time, check_links, time_of
from torchard.functional.reports.work import work_of

__all__ = ["Lowered"]


@dataclass
class Lowered(Program):
    """A Program with reports, which do not change it. Its ``str`` is its code.

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
        """The same program with reports; the graph is shared."""
        shared = {field.name: getattr(program, field.name) for field in fields(Program)}
        return Lowered(**shared, joint=joint)

    @property
    def residuals(self) -> Residuals:
        """The residuals of gradients taken inside, or else of the program's own gradient."""
        joint = self.joint
        return residuals_of(unrolled(self), joint and (lambda: unrolled(joint())))

    @property
    def peak(self) -> int:
        """Peak memory in bytes, arguments and results included.

        Donated arguments count until their last use. For a joint program, during its forward and then its
        backward. On a mesh, of the rank that holds
        most: what a collective sends and receives is held until it is awaited. Uncompiled code has this
        peak, to the byte, but for memory that operators take for themselves while they run; values in
        planned memory take ``memory.planned`` instead.
        """
        return peak_of(self)

    @property
    def memory(self) -> Memory:
        """Who holds memory at the peak, and what allocators and planned memory need.

        On a mesh, on the rank that holds most.
        """
        return memory_of(self)

    @property
    def work(self) -> Work:
        """FLOPs and bytes on one device and on the busiest rank, and how much each axis splits."""
        return work_of(self)

    @checked
    def time(self, machine: Machine) -> Time:
        """The seconds that the program takes on a machine, and the communication that it waits for.

        On a mesh, of one rank: computation is one stream, and each axis of the mesh one of collectives,
        issued and awaited where the plan does. Of a pipeline, one rank of each stage, and what they send.

        Raises:
            ValueError: the machine's links are all of axes that the program's mesh does not have.
        """
        check_links(self, machine)
        return time_of(self._lists, machine)

    @cached_property
    def _lists(self) -> list[RankList]:
        """What each rank runs, for any number of machines."""
        return lists_of(self)

    @cached_property
    def plan(self) -> Any:
        """Of a program on a mesh: what its plan costs, what each other one costs at least, and why.

        A `PlanReport`.

        Raises:
            ValueError: the program runs on no mesh, or its ranks compute on local values.
        """
        if not PLAN.on(self.output):
            raise ValueError(
                f"{self.name} has no plan, since it runs on no mesh; lower a function that "
                "torchard.shard returned."
            )
        return PLAN.of(self.output)(self)

    @property
    def schedule(self) -> Any:
        """Of a pipeline: which rank computes what when, with its bubble, its memory and what is sent.

        Raises:
            ValueError: the program is not a pipeline.
        """
        if not SCHEDULE.on(self.output):
            raise ValueError(
                f"{self.name} is not a pipeline; lower a function that torchard.pipeline returned."
            )
        return SCHEDULE.of(self.output)(self)

    def __str__(self) -> str:
        return program_text(self)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the program: layers, the values between them, collectives with their bytes.

        Args:
            path: the file, whose suffix (svg, pdf, png) is the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return draw(self, path)

    def bind(self) -> Bound:
        """A callable from all parts of all inputs, constants included, to all parts of all outputs.

        It may empty a list that it is given, so that inputs are freed after their last use, but not a
        tuple.
        """
        return bind(self)
