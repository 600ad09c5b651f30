"""The rewrite that applies the policies of checkpointed segments, after every other rewrite."""

from __future__ import annotations

from dataclasses import dataclass

from torchard.functional.programs.program import Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import LOOP
from torchard.functional.programs.unrolled import noted
from torchard.functional.remat.budget import within_budget
from torchard.functional.remat.policies import Budget
from torchard.functional.remat.rematerialise import decisions, rematerialise
from torchard.functional.remat.segments import segments_of

__all__ = ["RECOMPUTE", "Recompute"]


@dataclass(frozen=True)
class Recompute(Rewrite):
    """Applies policies: backward nodes read saved, recomputed or offloaded values.

    `checkpoint` asks for it. Policies see collectives and kernels whatever the order of the stack, and
    the passes that merge and order collectives see recomputed operations too.
    """

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(Stage.RECOMPUTE, self, reads_loops=True),)

    def __call__(self, program: Program) -> Program:
        if not _alike(program):
            program = noted(program, "a policy that treats iterations differently")
        return rematerialise(*within_budget(program))

    def inline(self, program: Program) -> Program:
        """Inside another trace, nodes stay marked until that trace is lowered."""
        return program


def _alike(program: Program) -> bool:
    """Whether the policies of a program treat all iterations of each loop alike.

    The halves of a joint program have no loops, nor has the program whose peak a budget bounds.
    """
    for node in program.calls:
        if (loop := LOOP.get(node)) is None:
            continue
        for segment in segments_of(node):
            if isinstance(segment.policy, Budget):
                if program.is_joint:
                    return False
                continue
            if len(set(decisions(node, segment.policy, range(loop.count)))) > 1:
                return False
    return True


RECOMPUTE = Recompute()
