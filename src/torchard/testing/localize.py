"""localize: where two functions that should agree first part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.tags import PHASE, SCOPE, SOURCE, VAL
from torchard.functional.reports.text import value_text
from torchard.testing.calls import seeded, with_parameters
from torchard.testing.observe import Observed, observed
from torchard.testing.rounding.bounds import Expected, expected
from torchard.testing.rounding.movement import rearranges
from torchard.testing.rounding.precision import Precision, precision_of

__all__ = ["Divergence", "Operation", "localize", "parting"]

# The most operations that are shown of each function.
_SHOWN = 4

_Kind = tuple[bool, bool, torch.Size]  # whether values are floating, complex, and their shape


@dataclass(frozen=True)
class Operation:
    """One operation of a program, where it is and how large the error of its value is.

    Attributes:
        op: its name: ``aten.mm``.
        source: the line that called it: ``model.py:12 in mlp``.
        scope: the enclosing scopes: ``block/3``.
        phase: ``forward`` or ``backward``.
        value: dtype and shape: ``f32[4, 8]``.
        error: the largest absolute error against the nearest value of its shape in the other function;
            infinite if it has none.
        bound: the error that rounding explains there.

    >>> from torchard.testing import Operation
    >>> op = Operation("aten.mm", "model.py:12 in mlp", "block/3", "forward", "f32[4, 8]", 0.5, 1e-6)
    >>> print(op)
    block/3  model.py:12 in mlp  aten.mm f32[4, 8]: off by 5.00e-01, rounding explains 1.00e-06
    """

    op: str
    source: str
    scope: str
    phase: str
    value: str
    error: float
    bound: float

    def __str__(self) -> str:
        place = "  ".join(filter(None, (self.scope, self.source)))
        note = "" if self.phase == "forward" else f" ({self.phase})"
        off = (
            "no such value in the other"
            if self.error == float("inf")
            else f"off by {self.error:.2e}"
        )
        return f"{place}  {self.op}{note} {self.value}: {off}, rounding explains {self.bound:.2e}"


@dataclass(frozen=True)
class Divergence:
    """Where two functions first differ: the first operations whose operands occur in both functions and
    whose results do not.

    Attributes:
        fn: such operations of the function under test, in order.
        reference: such operations of its reference.
        agree: whether all results agree; then there are no such operations.
        problem: why results cannot be compared: their number, shapes or dtypes differ.

    >>> import torch
    >>> from torchard.testing import Divergence, localize
    >>> divergence = localize(torch.exp, torch.sin, torch.ones(2))
    >>> isinstance(divergence, Divergence), divergence.agree, [o.op for o in divergence.fn]
    (True, False, ['aten.exp'])
    """

    fn: tuple[Operation, ...]
    reference: tuple[Operation, ...]
    agree: bool
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.agree:
            return "the functions agree up to rounding"
        lines = ["the functions first differ at"]
        for who, operations in (("fn", self.fn), ("reference", self.reference)):
            lines += [f"  {who}: {operation}" for operation in operations]
        return "\n".join(lines)


@checked
def localize(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    gradients: bool = False,
    seed: int = 0,
) -> Divergence:
    """Find where two functions that should agree first differ.

    Both run once, and every intermediate value is recorded. A value of one function occurs in the other
    if the other has a value of the same shape that differs by no more than rounding explains. From
    results that differ, the search goes back through values that do not occur in the other function, to
    the first operations whose operands do occur: these went wrong. Nothing needs to be named or hooked,
    and the functions need not have the same operations. Inside of `shard_map` each rank has its own
    value; it occurs in the reference if the concatenation of the ranks' values along a dim does, or their
    sum, or their common value.

    Args:
        fn: the function under test: sharded, checkpointed, fused, in half precision, or a different
            program.
        reference: a function that computes the same, without values of single ranks.
        args: the arguments of both; placed values are gathered for the reference.
        gradients: compare gradients with respect to all floating arguments too.
        seed: the seed of the perturbed runs that measure rounding.

    Returns:
        The operations of both functions at which they first differ; print it.

    >>> import torch
    >>> from torchard.testing import localize
    >>> def norm(x, eps=0.5):
    ...     return x / (x.square().mean() + eps).sqrt()
    >>> def mine(x, eps=0.5):
    ...     return x / (x.square().mean().sqrt() + eps)
    >>> print(localize(mine, norm, torch.tensor([1.0, 2.0])))
    the functions first differ at
      fn: ...
    """
    fn, reference, args = with_parameters(fn, reference, args)
    with seeded(seed):
        ours = observed(fn, args, gradients=gradients)
    with seeded(seed):
        theirs = observed(reference, tree.whole(args), gradients=gradients)
    return parting(ours, theirs, seed)


def parting(
    ours: Observed, theirs: Observed, seed: int = 0, precision: Precision | None = None
) -> Divergence:
    """Where two runs part; see `localize`. By default both count as computed in the dtypes of ours."""
    fixed, precision = precision is not None, precision or precision_of(ours.program)
    known = expected(
        theirs.program, theirs.inputs, theirs.values, seed=seed, precision=precision
    )
    match = _Match(ours, theirs, known, narrowing_counts=fixed)
    if problem := match.misfit():
        return Divergence((), (), agree=False, problem=problem)
    wrong = match.wrong_results()
    mine, other = (_Region.behind(nodes, match.occurs) for nodes in wrong)
    return Divergence(
        tuple(map(match.operation, _calls(mine.first))),
        tuple(map(match.operation, _calls([*other.joining, *other.first]))),
        agree=not any(wrong),
    )


def _calls(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The first of these operations; constants say little, and are shown where there is nothing else."""
    return ([n for n in nodes if n.op == "call_function"] or list(nodes))[:_SHOWN]


class _Match:
    """Which values of each of two runs occur in the other."""

    def __init__(
        self,
        ours: Observed,
        theirs: Observed,
        known: dict[fx.Node, Expected],
        narrowing_counts: bool = False,
    ) -> None:
        self.ours, self.theirs, self.known = ours, theirs, known
        self.passes_on = rearranges if narrowing_counts else _passes_on
        self.others: dict[_Kind, list[fx.Node]] = {}
        for node, value in theirs.values.items():
            self.others.setdefault(_kind(value), []).append(node)
        self.wholes = self._wholes()
        self.mine: dict[_Kind, list[torch.Tensor]] = {}
        for value in itertools.chain.from_iterable(self.wholes.values()):
            self.mine.setdefault(_kind(value), []).append(value)
        self._occurs: dict[fx.Node, bool] = {}
        # One number of each value says of most of millions of pairs that they do not agree.
        self._middles = {
            kind: torch.tensor([*map(_middle, xs)], dtype=torch.float64)
            for kind, xs in self.mine.items()
        }
        self._ranges = {
            kind: torch.tensor([_middle_range(known[n]) for n in nodes], dtype=torch.float64)
            for kind, nodes in self.others.items()
        }

    def _wholes(self) -> dict[fx.Node, list[torch.Tensor]]:
        """The global values of each of our nodes; for a node that varies over ranks, all candidates."""
        found = {node: [value] for node, value in self.ours.values.items()}
        shapes = {shape for *_, shape in self.others}
        for node, varying in self.ours.varying.items():
            found[node] = list(varying.wholes(shapes))
        return found

    def occurs(self, node: fx.Node) -> bool:
        """Whether a node's value, or the value of which it is a view, occurs in the other run."""
        if node not in self._occurs:
            self._occurs[node] = any(self._agree(a, b) for a, b in self._near(node)) or (
                self.passes_on(node) and bool(operands(node)) and all(map(self.occurs, operands(node)))
            )
        return self._occurs[node]

    def _pairs(self, node: fx.Node) -> Iterable[tuple[torch.Tensor, fx.Node]]:
        """Our values and their nodes of the same shape, of which the node is one."""
        if node in self.wholes:
            mine = self.wholes[node]
            return [(value, other) for value in mine for other in self.others.get(_kind(value), ())]
        if (value := self.theirs.values.get(node)) is None:
            return []
        return [(mine, node) for mine in self.mine.get(_kind(value), ())]

    def _near(self, node: fx.Node) -> Iterator[tuple[torch.Tensor, fx.Node]]:
        """The pairs that may agree."""
        if node in self.wholes:
            for value in self.wholes[node]:
                nodes, middle = self.others.get(_kind(value), []), _middle(value)
                low, high = self._ranges.get(_kind(value), torch.empty(0, 2)).unbind(1)
                yield from ((value, nodes[i]) for i in _places((middle < low) | (middle > high)))
        elif (other := self.theirs.values.get(node)) is not None:
            mine = self.mine.get(_kind(other), [])
            middles = self._middles.get(_kind(other), torch.empty(0))
            least, most = _middle_range(self.known[node])
            yield from ((mine[i], node) for i in _places((middles < least) | (middles > most)))

    def _agree(self, mine: torch.Tensor, other: fx.Node) -> bool:
        excess = self.known[other].excess(mine)
        return not excess.numel() or float(excess.max()) <= 1

    def misfit(self) -> str:
        """Why results cannot be compared one by one, if they cannot."""
        mine, other = self.ours.program.outputs, self.theirs.program.outputs
        if len(mine) != len(other):
            return f"fn returns {len(mine)} tensors, its reference {len(other)}"
        pairs = zip(mine, self.ours.program.results, self.theirs.program.results, strict=True)
        for leaf, a, b in pairs:
            if VAL.of(a).shape != VAL.of(b).shape or VAL.of(a).dtype != VAL.of(b).dtype:
                return f"{leaf.path} is {value_text(VAL.of(a))}, in the reference {value_text(VAL.of(b))}"
        return ""

    def wrong_results(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The results that differ, of both."""
        pairs = zip(self.ours.program.results, self.theirs.program.results, strict=True)
        wrong = [
            (a, b)
            for a, b in pairs
            if isinstance(a, fx.Node) and isinstance(b, fx.Node)
            if not self._agree(self.ours.values[a], b)
        ]
        return [a for a, _ in wrong], [b for _, b in wrong]

    def operation(self, node: fx.Node) -> Operation:
        """The description of a node."""
        nearest = min(
            ((self.known[b].error(a), b) for a, b in self._pairs(node)),
            key=lambda pair: pair[0],
            default=None,
        )
        error, bound = float("inf"), 0.0
        if nearest is not None:
            error, known = nearest[0], self.known[nearest[1]].bound
            bound = float(known.max()) if known is not None and known.numel() else 0.0
        return Operation(
            op_name(node),
            SOURCE.get(node) or "",
            SCOPE.get(node) or "",
            PHASE.get(node) or "forward",
            value_text(VAL.of(node)),
            error,
            bound,
        )


def _places(excluded: torch.Tensor) -> list[int]:
    """Where nothing is excluded."""
    found: list[int] = (~excluded).nonzero().flatten().tolist()
    return found


def _middle(x: torch.Tensor) -> float:
    """The number in the middle of a tensor, the real part of a complex one; NaN if there is none."""
    return float(x.flatten()[x.numel() // 2].real.detach()) if x.numel() else torch.nan


def _middle_range(known: Expected) -> tuple[float, float]:
    """Outside of which no middle number agrees; NaNs, which say nothing, where it is not finite."""
    exact, bound = _middle(known.exact), 0.0 if known.bound is None else _middle(known.bound)
    turned = known.turned is not None and bool(known.turned.any())
    return (torch.nan, torch.nan) if turned else (exact - 2 * bound, exact + 2 * bound)


def _kind(value: torch.Tensor) -> _Kind:
    return is_inexact(value), value.is_complex(), value.shape


def operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node that hold one tensor each; those of a tuple's maker for its items."""
    found: list[fx.Node] = []
    for source in node.all_input_nodes:
        found += [source] if isinstance(VAL.get(source), torch.Tensor) else operands(source)
    return found


def _passes_on(node: fx.Node) -> bool:
    casts = op_name(node) == "aten._to_copy"
    return node.op == "call_function" and (casts or rearranges(node))


@dataclass(frozen=True)
class _Region:
    """The operations behind wrong results, back to those whose values occur in the other run."""

    nodes: list[fx.Node]
    occurs: Callable[[fx.Node], bool]

    @staticmethod
    def behind(results: Sequence[fx.Node], occurs: Callable[[fx.Node], bool]) -> _Region:
        stack, reached = list(results), set(results)
        while stack:
            for source in operands(stack.pop()):
                if source not in reached and not occurs(source):
                    reached.add(source)
                    stack.append(source)
        return _Region(sorted(reached), occurs)

    @property
    def first(self) -> list[fx.Node]:
        """Operations all of whose operands occur in the other run."""
        return [node for node in self.nodes if all(map(self.occurs, operands(node)))]

    @property
    def joining(self) -> list[fx.Node]:
        """Operations that join a computed value that occurs in the other run with one that does not."""
        first = set(self.first)
        return [
            node
            for node in self.nodes
            if any(_computed(n) and self.occurs(n) for n in operands(node)) and node not in first
        ]


def _computed(node: fx.Node) -> bool:
    """Whether a value is more than an input or a part of one."""
    return node.op == "call_function" and (not rearranges(node) or any(map(_computed, operands(node))))
