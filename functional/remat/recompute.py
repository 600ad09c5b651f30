"""The rewrite that carries out what checkpoints have marked, after every other one has run."""

from __future__ import annotations

from dataclasses import dataclass

from torchard.functional.programs.program import Program, Rewrite, finishing
from torchard.functional.remat.budget import kept_within_budget
from torchard.functional.remat.rematerialise import rematerialise

__all__ = ["RECOMPUTE", "Recompute"]


@dataclass(frozen=True)
class Recompute(Rewrite):
    """Gives each value that a backward reads the version that the policies of its segments mean.

    `checkpoint` asks for it. It comes after all others, so that policies see collectives and kernels
    whatever the order of the stack, and before their post-passes, which see what is recomputed too.
    """

    stage = 2

    def __call__(self, program: Program) -> Program:
        return rematerialise(program, kept_within_budget(program, finishing(program.stack)))

    def inline(self, program: Program) -> Program:
        """Inside another trace segments stay marked until that one is lowered."""
        return program


RECOMPUTE = Recompute()
