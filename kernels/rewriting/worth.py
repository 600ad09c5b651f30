"""Whether a replacement pays: by the bytes that are moved, then by time.

A kernel must move fewer bytes. Then it takes the place of operations only where the program is faster
with it (trials.py); else they are left as they are written, at no cost in a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

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

__all__ = ["SMALL", "Profitability", "moves_less"]

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


class Profitability:
    """What kernels are worth in one program, as it was before any was used."""

    def __init__(self, program: Program) -> None:
        self.program, self.compiler = program, compiler_of(program)
        first = program.placeholders[:1]
        self.device = VAL.of(first[0]).device.type if first else "cpu"

    def least_elements(self, kernel: Kernel) -> int:
        """The elements of a result from which a kernel may pay; with code of its own, it always may."""
        return 0 if has_own_code(kernel.of or kernel, self.device) else WORTH_COMPILING // MOST_PASSES

    def why_not_tried(self, kernel: Kernel) -> str:
        """Why a kernel would be left as it is written wherever it is; empty if it is looked for.

        A compiler fuses all but products of matrices. A CPU computes several products as fast as one, and
        the compiled reference of a product is the product.
        """
        own = has_own_code(kernel, self.device)
        kinds = {term.op for term in kernel.patterns[0].alternatives[0].skeleton.terms}
        if self.compiler is not None:
            return COMPILED if not own or "dot" not in kinds else self._too_small
        if "dot" in kinds and (not own or (kinds <= _PRODUCTS and self.device == "cpu")):
            return "no faster here"
        return "" if own else self._too_small

    @cached_property
    def _too_small(self) -> str:
        """Why nothing that must be compiled for a trial is tried; empty if something may be."""
        values = (v for node in self.program.calls for v in tensors_of(VAL.get(node)))
        return "" if sum(v.nbytes for v in values) >= WORTH_COMPILING else SMALL

    def why_as_written(self, members: Sequence[FoundKernel], plan: Replacement) -> str:
        """Why operations are left as they are written, without a trial; empty if that must decide."""
        own = any(runs_by_itself(kernel, found, self.device) for kernel, found in members)
        many = plan.before - plan.after >= WORTH_COMPILING
        if self.compiler is not None:
            if not own or not any(_has_products(occurrence) for _, occurrence in members):
                return COMPILED
            return "" if many else SMALL
        if own:
            fewer = plan.operations - len(plan.parts) >= FEWER
            return "" if plan.before >= LARGE or (fewer and not self._by_bytes) else SMALL
        return "" if many or (plan.before >= LARGE and self.device != "cpu") else SMALL

    def trial_of(self, plan: Replacement) -> Trial | None:
        """The trial that decides about a plan; None if bytes decide."""
        if self._by_bytes:
            return None
        trial = Trial(self.program, plan, self.compiler)
        return trial if trial.feasible else None

    @cached_property
    def _by_bytes(self) -> bool:
        """Whether there are no trials, whose results differ: where algorithms must be deterministic.

        Nor on a mesh, where the shapes of shards are known only once they are planned.
        """
        placed = any(isinstance(leaf.tag, Placement) for leaf in self.program.inputs)
        planned = (r for r in self.program.stack if not isinstance(r, Compile))
        on_a_mesh = placed or any(one.stage == Stage.PLAN for r in planned for one in r.passes)
        return on_a_mesh or torch.are_deterministic_algorithms_enabled()


def _has_products(occurrence: Occurrence) -> bool:
    """Whether matrices are multiplied; all else a compiler fuses, with what is before and after."""
    return any(term.op == "dot" for term in occurrence.alternative.skeleton.terms)
