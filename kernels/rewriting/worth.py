"""Whether a replacement pays: by the bytes that are moved, then by time.

A kernel must move fewer bytes. Then it takes the place of operations only where the program is faster
with it (trials.py); else they are left as they are written, at no cost in a call.
"""

from __future__ import annotations

from collections.abc import Sequence

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
# Calls saved from which a kernel with code of its own is tried, however small the tensors are.
FEWER = 3

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


def why_as_written(program: Program, members: Sequence[Member], plan: Replacement) -> str:
    """Why operations are left as they are written, without a trial; empty if that must decide."""
    device = VAL.of(plan.results[0]).device.type
    own = any(runs_by_itself(kernel, occurrence, device) for kernel, occurrence in members)
    many = plan.before - plan.after >= WORTH_COMPILING
    if compiler_of(program) is not None:
        if not own or not any(_has_products(occurrence) for _, occurrence in members):
            return "the compiler fuses it"
        return "" if many else SMALL
    if own:
        fewer = plan.operations - len(plan.parts) >= FEWER
        return "" if plan.before >= LARGE or (fewer and not _by_bytes(program)) else SMALL
    return "" if many or (plan.before >= LARGE and device != "cpu") else SMALL


def _has_products(occurrence: Occurrence) -> bool:
    """Whether matrices are multiplied; all else a compiler fuses, with what is before and after."""
    return any(term.op == "dot" for term in occurrence.alternative.skeleton.terms)


def trial_of(program: Program, plan: Replacement) -> Trial | None:
    """The trial that decides about a plan; None if bytes decide."""
    if _by_bytes(program):
        return None
    trial = Trial(program, plan, compiler_of(program))
    return trial if trial.feasible else None


def _by_bytes(program: Program) -> bool:
    """Whether there are no trials, whose results differ: where algorithms must be deterministic.

    Nor on a mesh, where the shapes of shards are known only once they are planned.
    """
    placed = any(isinstance(leaf.tag, Placement) for leaf in program.inputs)
    planned = (r for r in program.stack if not isinstance(r, Compile))
    on_a_mesh = placed or any(one.stage == Stage.PLAN for r in planned for one in r.passes)
    return on_a_mesh or torch.are_deterministic_algorithms_enabled()
