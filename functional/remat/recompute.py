"""The rewrite that applies the policies of checkpointed segments, after every other rewrite."""

from __future__ import annotations

from dataclasses import dataclass

from torchard.functional.programs.program import Program, Rewrite, finishing
from torchard.functional.remat.budget import kept_within_budget
from torchard.functional.remat.rematerialise import rematerialise

__all__ = ["RECOMPUTE", "Recompute"]


@dataclass(frozen=True)
class Recompute(Rewrite):
    """Applies policies: backward nodes read saved, recomputed or offloaded values.

    `checkpoint` asks for it. It runs after all others, so that policies see collectives and kernels
    whatever the order of the stack, and before the post-passes, which see recomputed operations too.
    """

    stage = 2

    def __call__(self, program: Program) -> Program:
        return rematerialise(program, kept_within_budget(program, finishing(program.stack)))

    def inline(self, program: Program) -> Program:
        """Inside another trace, nodes stay marked until that trace is lowered."""
        return program


RECOMPUTE = Recompute()
