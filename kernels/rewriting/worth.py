"""Whether a replacement pays: by the bytes that are moved, then by time.

A kernel must move fewer bytes. Then it takes the place of operations only where the program is faster
with it (trials.py); else they are left as they are written, at no cost in a call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from torchard.functional.jit import Compile
from torchard.functional.programs.program import Placement, Program, Stage
from torchard.functional.programs.tags import VAL
from torchard.kernels.execution.buffers import LARGE, is_large
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Occurrence
from torchard.kernels.rewriting.plan import Replacement
from torchard.kernels.rewriting.region import runs_by_itself
from torchard.kernels.rewriting.trials import Trial, compiler_of

__all__ = ["SMALL", "moves_less", "trial_of", "why_as_written"]

SMALL = "small"
# Bytes saved from which a kernel is compiled for a trial: it takes seconds, and gains milliseconds.
WORTH_COMPILING = 1 << 25

Member = tuple[Kernel, Occurrence]


def moves_less(plan: Replacement) -> bool:
    """Whether a plan moves fewer bytes; or as many with fewer operations, or in reused memory."""
    if plan.after != plan.before:
        return plan.after < plan.before
    return plan.operations > len(plan.parts) or any(map(_large_on_cpu, plan.results))


def _large_on_cpu(node: fx.Node) -> bool:
    """Whether a result is large enough, on a CPU, for reused memory alone to pay."""
    val = VAL.of(node)
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and is_large(val)


def why_as_written(program: Program, members: Iterable[Member], plan: Replacement) -> str:
    """Why operations are left as they are written, without a trial; empty if that must decide."""
    if plan.before < LARGE:
        return SMALL
    device = VAL.of(plan.results[0]).device.type
    if any(runs_by_itself(kernel, occurrence, device) for kernel, occurrence in members):
        return ""
    if compiler_of(program) is not None:
        return "the compiler fuses it with its neighbours"
    saved = plan.before - plan.after
    return SMALL if device == "cpu" and saved < WORTH_COMPILING else ""


def trial_of(program: Program, plan: Replacement) -> Trial | None:
    """The trial that decides about a plan; None if bytes decide.

    On a mesh they do: the shapes of shards are known only once they are planned.
    """
    if torch.are_deterministic_algorithms_enabled() or _on_a_mesh(program):
        return None
    trial = Trial(program, plan, compiler_of(program))
    return trial if trial.feasible else None


def _on_a_mesh(program: Program) -> bool:
    placed = any(isinstance(leaf.tag, Placement) for leaf in program.inputs)
    planned = (r for r in program.stack if not isinstance(r, Compile))
    return placed or any(one.stage == Stage.PLAN for r in planned for one in r.passes)
