"""Values that a compiler may not recompute, because they are compared with something that was kept.

A compiler rounds a value otherwise in each piece of code that computes it. Where a policy keeps a
maximum, and its operand is recomputed in the backward, none of the recomputed elements need equal it.
"""

from __future__ import annotations

import operator

from torchard.functional.compiling.exact_routes import read_from_two_nodes
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import RECOMPUTE, WHY
from torchard.functional.remat.segments import Why

__all__ = ["keep_compared"]


def keep_compared(program: Program) -> Program:
    """Have backwards read such values as the forward computed them, in place."""
    if not any(RECOMPUTE.get(node) for node in program.calls):
        return program
    for value, *others in read_from_two_nodes(program.graph):
        for other in others:
            other.replace_all_uses_with(value)
        for item in value.users:
            if item.target is operator.getitem:
                forget(item, RECOMPUTE)
        WHY.set(value, Why("compared with a value that is kept"))
    program.graph.eliminate_dead_code()
    return program
