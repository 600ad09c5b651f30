"""The dtypes in which a program computes each result, and those in which it holds its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.accessors import pytree
from torchard.testing.rounding.roundings import narrower

__all__ = ["OWN", "Precision", "precision_of", "precisions"]


@dataclass(frozen=True)
class Precision:
    """The narrowest dtypes behind some results of one function.

    When a second function's results are compared with these, its operations count as computed in the
    narrowest dtype (or in their own, if that is narrower: see ``only``), and its inputs as held in the
    dtypes in which this function holds them.

    Attributes:
        narrowest: the narrowest dtype of all that is computed for the results. None if nothing is
            computed or the function is not known; the other function's own dtypes are then used.
        held: for each input, its path and the narrowest dtype of the input and of what is computed from
            it for the results.
        only: whether operations in a dtype narrower than ``narrowest`` also count as computed in
            ``narrowest``.

    >>> import torch, torchard as ta
    >>> from torchard.testing.rounding.precision import precisions
    >>> program = ta.trace(lambda x, y: (x.bfloat16().amax(), y.amax()))(torch.ones(3), torch.ones(3))
    >>> for precision, results in precisions(program).items():
    ...     print(precision, results)
    Precision(narrowest=torch.bfloat16, held=(('args[0]', torch.bfloat16),)) [0]
    Precision(narrowest=torch.float32, held=(('args[1]', torch.float32),)) [1]
    """

    narrowest: torch.dtype | None = None
    held: tuple[tuple[str, torch.dtype], ...] = ()
    only: bool = field(default=False, repr=False)

    def counted(self, dtype: torch.dtype) -> torch.dtype:
        """The real dtype in which an operation in ``dtype`` counts as computed."""
        return self.narrowest if self.narrowest and self.only else narrower(dtype, self.narrowest)

    def of_inputs(self, program: Program) -> dict[fx.Node, torch.dtype]:
        """The dtypes in which another program's inputs count as held: ``narrowest`` for unknown paths."""
        if self.narrowest is None:
            return {}
        known = dict(self.held)
        pairs = zip(program.placeholders, program.inputs, strict=True)
        return {node: known.get(leaf.path, self.narrowest) for node, leaf in pairs}


OWN = Precision()
"""The precision of a function that is not known: other functions' operations keep their own dtypes."""


def precisions(program: Program) -> dict[Precision, list[int]]:
    """The results of a program by their precision; results with one narrowest dtype share ``held``."""
    groups: dict[torch.dtype | None, dict[int, set[fx.Node]]] = {}
    for i, result in enumerate(program.results):
        if isinstance(result, fx.Node):
            behind = _behind(result)
            groups.setdefault(_narrowest(behind), {})[i] = behind
    return {
        Precision(narrowest, _held(program, set().union(*behind.values()))): list(behind)
        for narrowest, behind in groups.items()
    }


def precision_of(program: Program) -> Precision:
    """The narrowest dtypes of all values of a program."""
    nodes = set(program.graph.nodes)
    return Precision(_narrowest(nodes), _held(program, nodes))


def _held(program: Program, nodes: set[fx.Node]) -> tuple[tuple[str, torch.dtype], ...]:
    """The narrowest dtype of each input and of what depends on it, among these nodes."""
    least: dict[fx.Node, torch.dtype | None] = {}
    for node in sorted(nodes, reverse=True):
        least[node] = _least([*_dtypes(node), *(least.get(user) for user in node.users)])
    pairs = zip(program.placeholders, program.inputs, strict=True)
    held = ((leaf.path, least.get(node)) for node, leaf in pairs)
    return tuple((path, dtype) for path, dtype in held if dtype is not None)


def _behind(result: fx.Node) -> set[fx.Node]:
    """A node and all nodes that it depends on."""
    found, stack = {result}, [result]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def _narrowest(nodes: Iterable[fx.Node]) -> torch.dtype | None:
    return _least(dtype for node in nodes if node.op == "call_function" for dtype in _dtypes(node))


def _least(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    found: torch.dtype | None = None
    for dtype in dtypes:
        found = found if dtype is None else narrower(dtype, found)
    return found


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves(VAL.get(node)) if is_inexact(x)]
