"""BranchCall: the target of the node that a conditional is in a traced program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.tensor_spec import TensorSpec, contiguous
from torchard.functional.loops.call import LoopCall
from torchard.functional.programs.markers import Effect
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import VAL

__all__ = ["BranchCall", "branch_calls", "has_effects", "same_inputs"]


@dataclass(frozen=True, eq=False)
class BranchCall:
    """A conditional: called with an index, 0-d int64, and operands, it runs the branch of the index.

    Attributes:
        branches: programs without constants, whose inputs are the operands, and whose outputs have the
            same shapes and dtypes.
        run: runs it under any transform; set by whoever makes it (branches.py).
    """

    branches: tuple[Program, ...]
    run: Callable[[BranchCall, torch.Tensor, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    derived: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return f"cond_{self.branches[-1].name}"

    namespace = "torchard_branches"

    def __repr__(self) -> str:
        return f"cond({', '.join(branch.name for branch in self.branches)})"

    def __call__(self, index: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(self, index, operands)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A result that is derived from it, cached under a key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def result_specs(self) -> list[TensorSpec]:
        """The spec of each result."""
        vals = [VAL.of(node) for node in self.branches[0].results]
        return [contiguous(tuple(val.shape), val.dtype, val.device) for val in vals]


def has_effects(graph: fx.Graph) -> bool:
    """Whether there is an effect in a graph, or in what its loops and conditionals run."""
    for node in graph.nodes:
        target = node.target
        inside = target.branches if isinstance(target, BranchCall) else ()
        inside = (target.body,) if isinstance(target, LoopCall) else inside
        if isinstance(target, Effect) or any(has_effects(program.graph) for program in inside):
            return True
    return False


def branch_calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that are conditionals."""
    return [node for node in graph.nodes if isinstance(node.target, BranchCall)]


def same_inputs(programs: Sequence[Program], own: Sequence[int]) -> tuple[Program, ...]:
    """The programs with the inputs of all: those that they share, then the last ones of each.

    Args:
        own: how many of the last inputs of each are its own.
    """
    ends = [
        list(zip(program.inputs, program.placeholders, strict=True))[len(program.inputs) - count :]
        for program, count in zip(programs, own, strict=True)
    ]
    return tuple(
        _padded(
            program,
            own[i],
            [pair for end in ends[:i] for pair in end],
            [pair for end in ends[i + 1 :] for pair in end],
        )
        for i, program in enumerate(programs)
    )


Ends = Sequence[tuple[Leaf, fx.Node]]


def _padded(program: Program, own: int, before: Ends, after: Ends) -> Program:
    """The program with the inputs of others, which it does not read, before its last ones and after."""
    if not before and not after:
        return program
    graph, env = type(program.graph)(), dict[fx.Node, fx.Node]()
    nodes, at = program.placeholders, len(program.inputs) - own
    for i, node in enumerate((*nodes[:at], *(n for _, n in before), *nodes[at:], *(n for _, n in after))):
        env[node] = graph.placeholder(f"in{i}")
        VAL.set(env[node], VAL.of(node))
    for node in program.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    others = [replace(leaf, role="closure") for leaf, _ in (*before, *after)]
    count, inputs = len(before), program.inputs
    leaves = (*inputs[:at], *others[:count], *inputs[at:], *others[count:])
    return replace(program, graph=graph, inputs=leaves, retrace=_ignoring(program, at, count))


def _ignoring(program: Program, at: int, count: int) -> Any:
    """How the program is traced again: without the inputs that it does not read."""
    again, own = program.retrace, len(program.inputs) - at
    if again is None:
        return None
    return lambda inputs: again([*inputs[:at], *inputs[at + count : at + count + own]])
