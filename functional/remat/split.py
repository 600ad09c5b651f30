"""Splits a joint program into a forward and a backward that share residuals.

The set of saved values decides everything: the backward recomputes the values it needs that are neither
saved nor derived from saved ones, each right before its first use (recomputing them early raises the peak
by a third).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx

from torchard.functional.programs.loops import is_apart, iterating
from torchard.functional.programs.markers import COLLECTORS, item
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import BRANCH, HALVES, LOOP, RECOMPUTE, RESIDUAL
from torchard.functional.programs.views import forward_offloads, is_tuple, is_view, needed_by
from torchard.functional.torch_internals import ProgramGraph

__all__ = ["JointCut", "Saved", "Split", "halves_of", "spans_of", "split"]

@dataclass(frozen=True)
class Saved:
    """The location of a residual after the forward: an input, an output, or an extra output."""

    kind: Literal["input", "output", "value"]
    index: int


@dataclass
class Split:
    """The halves of a joint program.

    ``forward`` takes the joint's inputs without its cotangents; it returns the outputs, then the
    residuals of kind ``value`` (role ``residual``). ``backward`` takes all residuals in the order
    of ``saved``, then the cotangents; it returns the gradients.
    """

    forward: Program
    backward: Program
    saved: list[Saved]
    # What a compiler made of both halves, for the one that is bound second.
    bound: dict[Hashable, Any] = field(default_factory=dict)

    def parts(self, width: Callable[[Leaf], int]) -> tuple[list[tuple[int, int]], int]:
        """The residuals and outputs as parts, of which a leaf may have several.

        Args:
            width: the number of parts of a leaf.

        Returns:
            For each part of a residual, its list (0 inputs, 1 outputs, 2 values) and its index there; and
            the number of parts of outputs.
        """
        outputs = [leaf for leaf in self.forward.outputs if leaf.role != "residual"]
        values = [leaf for leaf in self.forward.outputs if leaf.role == "residual"]
        tables = {
            kind: (i, spans_of(map(width, leaves)))
            for i, (kind, leaves) in enumerate(
                (("input", self.forward.inputs), ("output", outputs), ("value", values))
            )
        }
        found = [
            (tables[residual.kind][0], part)
            for residual in self.saved
            for part in tables[residual.kind][1][residual.index]
        ]
        return found, sum(map(width, outputs))


@dataclass
class JointCut:
    """The partition of a joint program's nodes: which may be saved, which depend on cotangents."""

    program: Program
    tainted: set[fx.Node] = field(default_factory=set)
    forward: set[fx.Node] = field(default_factory=set)
    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        results = list(zip(self.program.outputs, self.program.results, strict=True))
        self.outputs = [node for leaf, node in results if leaf.role != "gradient"]
        self.gradients = [node for leaf, node in results if leaf.role == "gradient"]
        self.forward = needed_by([*self.outputs, *forward_offloads(self.program)])
        for leaf, node in zip(self.program.inputs, self.program.placeholders, strict=True):
            if leaf.role == "cotangent":
                self.tainted.add(node)
        for node in self.program.graph.nodes:
            if any(source in self.tainted for source in node.all_input_nodes):
                self.tainted.add(node)
        self._collect()
        for node in self.outputs:
            if node in self.tainted:
                raise ValueError(f"output {node} depends on a cotangent, so no forward can compute it")

    def _collect(self) -> None:
        """Add to the forward what collects values of its loops: no iteration is left to the backward."""
        collectors = [n for n in self.program.calls if n.target in COLLECTORS and not is_apart(n)]
        before = -1
        while before < len(self.forward):
            before = len(self.forward)
            loops = {LOOP.of(node) for node in self.forward if LOOP.on(node)}
            for node in collectors:
                if node not in self.tainted and any(LOOP.get(n) in loops for n in node.all_input_nodes):
                    self.forward |= needed_by([node])

    def saveable(self, node: fx.Node) -> bool:
        """Whether the forward computes the value and saving it is better than recomputing it."""
        if node.op == "placeholder":
            return node not in self.tainted
        if is_apart(node):
            return False
        if node.target is item and is_apart(node.all_input_nodes[0]):
            return True  # what a loop of the forward hands over (loop_residuals.py)
        if _is_item(node):
            whole = _whole(node)
            return self._computed(whole) and not is_view(whole) and not _is_recomputed(node)
        return self._computed(node) and not is_view(node) and not is_tuple(node)

    def _computed(self, node: fx.Node) -> bool:
        return node in self.forward and not _is_recomputed(node)


def _is_recomputed(node: fx.Node) -> bool:
    if RECOMPUTE.get(node) or BRANCH.on(node):
        return True
    return _is_item(node) and _is_recomputed(_whole(node))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _whole(item: fx.Node) -> fx.Node:
    """The tuple an item is taken from."""
    return item.all_input_nodes[0]


def _backward_nodes(cut: JointCut) -> tuple[list[fx.Node], list[fx.Node]]:
    """The residuals, and the nodes that the backward computes, in execution order.

    Nodes that depend on a cotangent keep their order; the others come right before their first use.
    """
    residuals: dict[fx.Node, None] = {}
    done: dict[fx.Node, None] = {}

    def emit(root: fx.Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done or node in residuals or _is_cotangent(node, cut):
                stack.pop()
            elif node not in cut.tainted and cut.saveable(node):
                residuals[node] = None
                stack.pop()
            elif missing := [s for s in node.all_input_nodes if _missing(s, done, residuals, cut)]:
                stack.extend(reversed(missing))
            else:
                done[node] = None
                stack.pop()
                # What enters an iteration is handed on by the one before.
                stack.extend(each for each in iterating(node) if each not in cut.tainted)

    wanted = needed_by(cut.gradients)
    for node in cut.program.graph.nodes:
        if node.op == "call_function" and node in cut.tainted and node in wanted:
            emit(node)
    for node in cut.gradients:
        emit(node)
    return list(residuals), list(done)


def _is_cotangent(node: fx.Node, cut: JointCut) -> bool:
    return node.op == "placeholder" and node in cut.tainted


def _missing(
    node: fx.Node, done: dict[fx.Node, None], residuals: dict[fx.Node, None], cut: JointCut
) -> bool:
    return node not in done and node not in residuals and not _is_cotangent(node, cut)


def split(program: Program) -> Split:
    """Split a joint program (possibly rewritten) into its halves.

    A node tagged ``recompute`` is never a residual; the backward recomputes it from saved values. Views
    are recomputed from their base, so that each residual has its own storage. Values that only the
    backward uses are computed there.

    Raises:
        ValueError: an output depends on a cotangent.
    """
    cut = JointCut(program)
    residuals, nodes = _backward_nodes(cut)
    inputs = [
        (leaf, node)
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        if leaf.role != "cotangent"
    ]
    saved, values = _where(residuals, [node for _, node in inputs], cut.outputs)
    forward, backward = _forward(program, cut, values), _backward(program, cut, residuals, nodes)
    both = Split(forward, backward, saved)
    for half in (forward, backward):
        HALVES.set(half.output, both)
    return both


def halves_of(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operations of a joint program's forward and backward, in execution order after a split."""
    cut = JointCut(program)
    residuals, nodes = _backward_nodes(cut)
    wanted = needed_by([*cut.outputs, *residuals])
    return [n for n in program.calls if n in wanted], [n for n in nodes if n.op == "call_function"]


def spans_of(widths: Iterable[int]) -> list[range]:
    """The ranges of these widths, one after another."""
    ends = list(itertools.accumulate(widths, initial=0))
    return [range(*pair) for pair in itertools.pairwise(ends)]


def _where(
    residuals: list[fx.Node], inputs: list[fx.Node], outputs: list[Any]
) -> tuple[list[Saved], list[fx.Node]]:
    saved: list[Saved] = []
    values: list[fx.Node] = []
    for node in residuals:
        if node in inputs:
            saved.append(Saved("input", inputs.index(node)))
        elif node in outputs:
            saved.append(Saved("output", outputs.index(node)))
        else:
            saved.append(Saved("value", len(values)))
            values.append(node)
    return saved, values


def _residual_leaf(program: Program, node: fx.Node) -> Leaf:
    for leaf, result in zip(program.outputs, program.results, strict=True):
        if result is node and leaf.role != "gradient":
            return replace(leaf, role="residual", of=None)
    for leaf, placeholder in zip(program.inputs, program.placeholders, strict=True):
        if placeholder is node:
            return replace(leaf, role="residual", of=None)
    tag = None if program.runtime is None else program.runtime.residual_tag(node)
    return Leaf(node.name, tag, "residual")


def _forward(program: Program, cut: JointCut, values: list[fx.Node]) -> Program:
    graph = ProgramGraph()
    env: dict[fx.Node, fx.Node] = {}
    wanted = needed_by([*cut.outputs, *values])
    inputs = []
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        if leaf.role != "cotangent":
            env[node] = graph.node_copy(node, env.__getitem__)
            inputs.append(leaf)
    for node in program.graph.nodes:
        if node.op == "call_function" and node in wanted:
            env[node] = graph.node_copy(node, env.__getitem__)
    for node in values:
        RESIDUAL.set(env[node], True)
    results = fx.map_arg((*cut.outputs, *values), env.__getitem__)
    graph.output(results)
    outputs = [leaf for leaf in program.outputs if leaf.role != "gradient"]
    return replace(
        program,
        graph=graph,
        inputs=tuple(inputs),
        outputs=(*outputs, *(_residual_leaf(program, node) for node in values)),
        name=f"{program.name}_forward",
    )


def _backward(
    program: Program, cut: JointCut, residuals: list[fx.Node], nodes: list[fx.Node]
) -> Program:
    graph = ProgramGraph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = []
    for node in residuals:
        env[node] = graph.placeholder(node.name)
        inherit(env[node], node, "value")
        inputs.append(_residual_leaf(program, node))
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        if leaf.role == "cotangent":
            env[node] = graph.node_copy(node, env.__getitem__)
            inputs.append(leaf)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(fx.map_arg(tuple(cut.gradients), env.__getitem__))
    return replace(
        program,
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(leaf for leaf in program.outputs if leaf.role == "gradient"),
        name=f"{program.name}_backward",
        constants=(),
    )
