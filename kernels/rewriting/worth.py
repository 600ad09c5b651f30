"""Whether a replacement pays: by the bytes that are moved, then by time.

A kernel must move fewer bytes. Then it takes the place of operations only where the program is faster
with it (trials.py); else they are left as they are written, at no cost in a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torchard.functional.core.outputs import tensors_of
from torchard.functional.jit import Compile
from torchard.functional.programs.program import Placement, Program, Stage
from torchard.functional.programs.tags import VAL
from torchard.kernels.execution.buffers import LARGE, is_large
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Occurrence
from torchard.kernels.rewriting.plan import Replacement
from torchard.kernels.rewriting.region import has_own_code, runs_by_itself
from torchard.kernels.rewriting.trials import Trial, compiler_of

__all__ = ["SMALL", "least_elements", "moves_less", "trial_of", "why_as_written", "why_not_tried"]

SMALL, COMPILED = "small", "the compiler fuses it"
# Bytes saved from which a kernel is compiled for a trial: it takes seconds, and gains milliseconds.
WORTH_COMPILING = 1 << 25
# How often the operations of a kernel and its gradient read or write an element, in bytes, at most.
MOST_PASSES = 1 << 8
# What terms of products and their biases are.
_PRODUCTS = {"dot", "sum", "input"}
# Calls saved from which a kernel with code of its own is tried, however small the tensors are.
FEWER = 3

FoundKernel = tuple[Kernel, Occurrence]


def moves_less(plan: Replacement) -> bool:
    """Whether a plan moves fewer bytes; or as many with fewer operations, or in reused memory."""
    if plan.after != plan.before:
        return plan.after < plan.before
    return plan.operations > len(plan.parts) or any(map(_large_on_cpu, plan.results))


def _large_on_cpu(node: fx.Node) -> bool:
    """Whether a result is large enough, on a CPU, for reused memory alone to pay."""
    val = VAL.of(node)
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and is_large(val)


def least_elements(kernel: Kernel, program: Program) -> int:
    """The elements of a result from which a kernel may pay; those with code of their own always may."""
    return 0 if has_own_code(kernel.of or kernel, _device(program)) else WORTH_COMPILING // MOST_PASSES


def _device(program: Program) -> str:
    return str(VAL.of(program.placeholders[0]).device.type) if program.placeholders else "cpu"


def why_not_tried(kernel: Kernel, program: Program) -> str:
    """Why a kernel would be left as it is written wherever it is; empty if it is looked for.

    A compiler fuses all but products of matrices. A CPU computes several products as fast as one, and
    the compiled reference of a product is the product.
    """
    own = has_own_code(kernel, _device(program))
    kinds = {term.op for term in kernel.patterns[0].alternatives[0].skeleton.terms}
    if compiler_of(program) is not None:
        return COMPILED if not own or "dot" not in kinds else _too_small(program)
    if "dot" in kinds and (not own or (kinds <= _PRODUCTS and _device(program) == "cpu")):
        return "no faster here"
    return "" if own else _too_small(program)


def _too_small(program: Program) -> str:
    return "" if _bytes_of(program) >= WORTH_COMPILING else SMALL


def _bytes_of(program: Program) -> int:
    return sum(v.nbytes for node in program.calls for v in tensors_of(VAL.get(node)))


def why_as_written(program: Program, members: Sequence[FoundKernel], plan: Replacement) -> str:
    """Why operations are left as they are written, without a trial; empty if that must decide."""
    device = VAL.of(plan.results[0]).device.type
    own = any(runs_by_itself(kernel, occurrence, device) for kernel, occurrence in members)
    many = plan.before - plan.after >= WORTH_COMPILING
    if compiler_of(program) is not None:
        if not own or not any(_has_products(occurrence) for _, occurrence in members):
            return COMPILED
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
