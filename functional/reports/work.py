"""The work of a program: on one device, and on the busiest rank of a mesh."""

from __future__ import annotations

from torchard.functional.costs.flops import flops_of
from torchard.functional.costs.traffic import bytes_touched
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Work
from torchard.functional.remat.liveness import as_run, writes_of

__all__ = ["work_of"]


def work_of(program: Program) -> Work:
    """The work of a program, over its mesh if it has one."""
    over_mesh = None if program.runtime is None else program.runtime.work(program)
    if over_mesh is not None:
        return over_mesh
    done, runs = sum(map(flops_of, program.calls)), as_run(program)
    writes = writes_of(runs)
    touched = sum(bytes_touched(node, writes.get(node)) for node in runs.calls)
    return Work(done, touched, done, touched)
