"""prove: the walk over a plan's graph, its inputs and outputs, and the report."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import fx

from torchard.functional.core.arguments import Like, checked
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.markers import again
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import LAYOUT, SOURCE, STEP, VAL
from torchard.sharding.layouts.factors import RuleError
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.tags import BUCKET, CALL, RULE
from torchard.sharding.manual.manual_collectives import is_axis_index, move_of
from torchard.sharding.rules.registry import Call, result_index, rule_of
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.place import MeshPlacement
from torchard.testing.prove.certificates import certify
from torchard.testing.prove.operations import instance
from torchard.testing.prove.steps import awaited, check_bucket, check_step, same

__all__ = ["Gap", "Proof", "Unproved", "prove"]


@dataclass(frozen=True)
class Gap:
    """A node for which the proof fails, or which it takes for granted.

    Attributes:
        node: its name in the graph.
        op: the operation, or the kind of step: ``aten.mm``, ``all_reduce``.
        source: the line that called it: ``model.py:12 in mlp``.
        layouts: the layouts of its operands and results: ``P(tp), P() -> P()``.
        reason: the condition that does not hold.

    >>> from torchard.testing import Gap
    >>> print(Gap("mm", "aten.mm", "model.py:12 in mlp", "P(tp), P() -> P()", "partial over tp"))
    mm (aten.mm at model.py:12 in mlp) P(tp), P() -> P(): partial over tp
    """

    node: str
    op: str
    source: str
    layouts: str
    reason: str

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.node} ({self.op}{at}) {self.layouts}: {self.reason}"


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        operations, steps: how many nodes of each kind there are.
        certificates: how many claims of factor rules the proof uses, all of them tested.
        assumed: nodes that are taken for granted: exchanges of windows, collectives of shard_map.
        gaps: nodes for which the proof fails; empty in a result of `prove`.

    >>> from torchard.testing import Proof
    >>> print(Proof(operations=3, steps=1, certificates=4))
    3 operations and 1 steps by 4 certificates, 0 assumed, 0 not proved
    """

    operations: int
    steps: int
    certificates: int
    assumed: tuple[Gap, ...] = ()
    gaps: tuple[Gap, ...] = ()

    def __str__(self) -> str:
        head = (
            f"{self.operations} operations and {self.steps} steps by {self.certificates} certificates, "
            f"{len(self.assumed)} assumed, {len(self.gaps)} not proved"
        )
        return "\n".join([head, *(f"  {gap}" for gap in self.gaps)])


class Unproved(AssertionError):
    """A plan whose proof fails.

    Attributes:
        proof: with the gaps.

    >>> from torchard.testing import Unproved
    >>> issubclass(Unproved, AssertionError)
    True
    """

    def __init__(self, proof: Proof) -> None:
        super().__init__(f"the plan is not proved: {proof}")
        self.proof = proof


@runtime_checkable
class _OnMesh(Protocol):
    mesh: Mesh


@checked
def prove(program: Annotated[Program, Like("shard(fn, mesh, ...).lower(*args)")]) -> Proof:
    """Prove that a sharded plan computes the same as its global program, for all values.

    Only small tests of operators are run, once for each claim of a factor rule. The time is that of one
    walk over the plan, whatever the sizes of the values and of the mesh.

    Args:
        program: a result of ``lower`` or ``lower_joint`` of a function of `shard`.

    Returns:
        The proof: the number of nodes, and the claims that it uses.

    Raises:
        Unproved: an AssertionError that lists each node for which the proof fails, with its line, its
            layouts and the reason.
        ValueError: the program is not sharded.

    Source: Scalify, arXiv:2509.10694; TrainVerify, SOSP 2025. What is proved, and what is taken for
    granted, is in the docstring of ``torchard.testing.prove``.

    >>> import torch, torchard as ta
    >>> from torchard.testing import prove
    >>> mesh = ta.Mesh({"tp": 4096}, virtual=True)
    >>> def mlp(up, down, x):
    ...     return torch.relu(x @ up) @ down
    >>> run = ta.shard(mlp, mesh, (ta.P(None, "tp"), ta.P("tp"), ta.P()), ta.P())
    >>> shapes = (512, 16384), (16384, 512), (64, 512)
    >>> plan = run.lower(*(torch.empty(shape, device="meta") for shape in shapes))
    >>> print(prove(plan))
    3 operations and 3 steps by 3 certificates, 0 assumed, 0 not proved
    """
    if not isinstance(program.runtime, _OnMesh):
        raise ValueError(
            f"prove({program.name}): the program is not sharded; give it what "
            "shard(f, mesh, ...).lower(*args) returns."
        )
    proof = _Walk(program.copy(), program.runtime.mesh.sizes).proof()
    if proof.gaps:
        raise Unproved(proof)
    return proof


class _Walk:
    """One pass over a graph, whose nodes have forgotten what planning remembered of their rules."""

    def __init__(self, program: Program, sizes: Sizes) -> None:
        self.program, self.sizes = program, sizes
        self.gaps: list[Gap] = []
        self.assumed: list[Gap] = []
        self.claims: set[Any] = set()
        self.steps = self.operations = 0
        for node in program.graph.nodes:
            forget(node, CALL, RULE)

    def proof(self) -> Proof:
        self._ends()
        for node in self.program.calls:
            if reason := self._malformed(node) or self._call(node):
                self.gaps.append(_gap(node, reason))
        self._buckets()
        return Proof(
            self.operations, self.steps, len(self.claims), tuple(self.assumed), tuple(self.gaps)
        )

    def _call(self, node: fx.Node) -> str:
        """Why a node is not proved, if it is not."""
        if STEP.on(node):
            self.steps += 1
            (source,) = node.all_input_nodes
            if VAL.of(source).shape != VAL.of(node).shape:
                return "a step must not change a global shape"
            return check_step(STEP.of(node), LAYOUT.of(source), LAYOUT.of(node), self.sizes)
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            item = LAYOUT.of(source)[result_index(node)]
            return "" if same(item, LAYOUT.of(node), self.sizes) else f"the item is held as {item}"
        self.operations += 1
        if is_axis_index(node) or move_of(node) is not None:
            self.assumed.append(_gap(node, "a collective that a user wrote in a shard_map"))
            return ""
        return self._operation(node)

    def _operation(self, node: fx.Node) -> str:
        call = Call.of(node)
        ins, outs = tuple(map(LAYOUT.of, call.operands)), _layouts(node)
        if node.target is again and not same(ins[0], ins[1], self.sizes):
            return "the next iteration takes it in a different layout"
        own = {axis for layout in ins for axis in layout.varying}
        if any(layout.varying != own for layout in outs):
            return f"ranks have their own operands over {sorted(own)}, and not their own results"
        ins, outs = (tuple(layout.varying_over(()) for layout in side) for side in (ins, outs))
        if not any(layout.axes for layout in (*ins, *outs)):
            return ""
        if {axis for layout in (*ins, *outs) for axis in layout.axes} & own:
            return f"{sorted(own)} also split values, or are reduced over"
        try:
            rule = rule_of(call)
        except (RuleError, IndexError) as error:
            return f"its rule is not for these arguments: {error}"
        found = instance(rule, ins, outs, self.sizes)
        if found.problem:
            return found.problem
        if found.exchanges:
            self.assumed.append(_gap(node, "ranks exchange windows with their neighbours"))
        for claim in found.claims:
            if reason := certify(call, rule, claim):
                return reason
            self.claims.add((call.target, rule, claim))
        return ""

    def _malformed(self, node: fx.Node) -> str:
        """The fault of a node's layouts by themselves."""
        val = VAL.get(node)
        vals = [
            v
            for v in (val if isinstance(val, (tuple, list)) else [val])
            if isinstance(v, torch.Tensor)
        ]
        layouts = _layouts(node)
        if len(layouts) != len(vals) or not all(isinstance(layout, Layout) for layout in layouts):
            return "it has no layout for each of its results"
        for layout, v in zip(layouts, vals, strict=True):
            axes = [*layout.split_axes, *(a for a, _ in layout.pending)]
            if (
                layout.shape != tuple(v.shape)
                or len(set(axes)) < len(axes)
                or set(axes) - {*dict(self.sizes)}
            ):
                return f"{layout} is not a layout of a value of shape {list(v.shape)}"
        return ""

    # -- inputs and outputs -----------------------------------------------------------------------

    def _ends(self) -> None:
        program = self.program
        for leaf, node in zip(program.inputs, program.placeholders, strict=True):
            if reason := self._malformed(node) or self._leaf(leaf, node) or self._partner(leaf):
                self.gaps.append(_gap(node, reason))
        for leaf, node in zip(program.outputs, program.results, strict=True):
            if not isinstance(node, fx.Node) or self._malformed(node):
                continue  # a number, or reported where it is made
            if reason := self._leaf(leaf, node) or self._partner(leaf):
                self.gaps.append(_gap(node, reason))

    def _partner(self, leaf: Leaf) -> str:
        """Whether a cotangent is placed as its output is, and a gradient as its input."""
        program = self.program
        if leaf.of is None or all(out.role != "output" for out in program.outputs):
            return ""  # in a backward by itself, neither is at hand
        partners = {"cotangent": program.outputs, "gradient": program.inputs}
        partner = partners[leaf.role][leaf.of] if leaf.role in partners else leaf
        return "" if partner.tag == leaf.tag else f"{leaf.path} is not placed as {partner.path} is"

    def _leaf(self, leaf: Leaf, node: fx.Node) -> str:
        """Whether an input's or an output's placement is its layout."""
        have: Layout = LAYOUT.of(node)
        if leaf.role != "residual" and (have.varying or awaited(have, self.sizes)):
            return f"{leaf.path} is held as {have}, which is no value yet"
        shape = tuple(VAL.of(node).shape)
        placed = isinstance(leaf.tag, MeshPlacement)
        want = (
            leaf.tag.layout(shape)
            if isinstance(leaf.tag, MeshPlacement)
            else Layout.replicated(shape)
        )
        if same(have, want, self.sizes):
            return ""
        how = f"placed as {want}" if placed else "plain, the same global value on every rank"
        return f"{leaf.path} is held as {have}, and is {how}"

    def _buckets(self) -> None:
        buckets: dict[Any, list[fx.Node]] = {}
        for node in self.program.calls:
            if STEP.on(node) and BUCKET.on(node):
                buckets.setdefault(BUCKET.of(node), []).append(node)
        for members in buckets.values():
            if reason := check_bucket((STEP.of(n), VAL.of(n).dtype) for n in members):
                self.gaps += [_gap(n, reason) for n in members]


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    found: Any = LAYOUT.get(node)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _gap(node: fx.Node, reason: str) -> Gap:
    op = (
        STEP.of(node).kind
        if STEP.on(node)
        else op_name(node)
        if node.op == "call_function"
        else node.op
    )
    operands = ", ".join(_texts(node.all_input_nodes))
    made = ", ".join(_texts([node]))
    layouts = f"{operands} -> {made}" if operands else made
    return Gap(node.name, op, SOURCE.get(node) or "", layouts, reason)


def _texts(nodes: Iterable[fx.Node]) -> Iterator[str]:
    return (str(layout) for node in nodes for layout in _layouts(node))
