"""Rematerialisation: apply the policies of checkpointed segments to the graph.

By default a value of the forward that a backward reads is saved. Where the policy of a segment that
encloses both says otherwise, the backward reads a *version* of the value instead: the same operation on
versions of its operands, right before the first use. The graph has all versions, so that reports and
other rewrites see them, and a split has nothing to decide.

Segments nest. A node in segments s1 ⊃ s2 has up to three versions: the original; the one recomputed in
the backward of s1, which saves the values that s2 saves; and the one recomputed from that in the backward
of s2. A use reads the recomputed value only inside segments that enclose both the use and the definition.
So a value that is read outside of its segment, an output of the segment, is saved whatever the policy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.loops import iterating, move_to_readers
from torchard.functional.programs.markers import Effect, Loop
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import inherit, put
from torchard.functional.programs.tags import (
    COLLECTIVE,
    KERNEL,
    LOOP,
    PHASE,
    RECOMPUTE,
    SCOPE,
    SEGMENTS,
    VAL,
    WHY,
)
from torchard.functional.programs.views import (
    base_of,
    forward_offloads,
    handed_value,
    is_tuple,
    labels_of,
    needed_by,
    storage_of,
    sweep,
)
from torchard.functional.remat.offload import offload_after, reload_before
from torchard.functional.remat.policies import COLLECTIVE_PREFIX, Budget
from torchard.functional.remat.policy import Decision, Policy, Shapes
from torchard.functional.remat.segments import (
    Segment,
    Why,
    segments_of,
    shared_segments,
    why_kept,
)

__all__ = ["decisions", "passes_of", "rematerialise", "tag_version"]

Segments = tuple[Segment, ...]
# A node, how many of its segments are recomputed (0: the original), and in which pass.
Version = tuple[fx.Node, int, int]


def rematerialise(program: Program, kept: Set[fx.Node] = frozenset()) -> Program:
    """The program with every version that its backward needs; nodes keep their segments.

    Args:
        kept: the values that segments with a budget keep (budget.py).

    Raises:
        CheckpointError: a policy returns something other than a decision.
    """
    if not any(segments_of(node) for node in program.graph.nodes):
        return program
    rewritten = program.copy()
    copies = dict(zip(program.graph.nodes, rewritten.graph.nodes, strict=True))
    passes = passes_of(rewritten)
    apart = _separate_passes(rewritten.graph, passes)
    versions = _Versions(rewritten.graph, passes, {copies[node] for node in kept})
    versions.run()
    sweep(rewritten.graph)
    move_to_readers(rewritten.graph, {*apart, *versions.loops.values()})
    return rewritten


def passes_of(program: Program) -> dict[fx.Node, int]:
    """The pass of each node: 0 for the forward, 1 for gradients taken inside, 2 for the cotangents'.

    Nodes that no output needs are in the pass of the cotangents, except offloads. An item of a tuple is
    in the pass of the tuple. What the carries of a loop depend on is in the pass of the carries, as where
    a block takes a gradient: no pass over all iterations can come before it.
    """
    outputs = [
        value
        for leaf, value in zip(program.outputs, program.results, strict=True)
        if leaf.role != "gradient"
    ]
    passes: dict[fx.Node, int] = {}
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        passes[node] = 2 if leaf.role == "cotangent" else 0
    joint = 2 in passes.values()
    forward = needed_by([*outputs, *forward_offloads(program)])
    for node in program.calls:
        if node.target is operator.getitem:
            passes[node] = passes[node.all_input_nodes[0]]
            continue
        late = joint and node not in forward
        passes[node] = 2 if late else int(PHASE.get(node) == "backward")
    _within_iterations(program, passes)
    return passes


def _within_iterations(program: Program, passes: dict[fx.Node, int]) -> None:
    """Put what an iteration computes for an earlier pass into that pass."""
    for node in reversed(program.calls):
        if (loop := LOOP.get(node)) is not None:
            for operand in node.all_input_nodes:
                if LOOP.get(operand) is loop:
                    passes[operand] = min(passes[operand], passes[node])
    for node in program.calls:
        if LOOP.on(node) and node.target is operator.getitem:
            passes[node] = passes[node.all_input_nodes[0]]


def _separate_passes(graph: fx.Graph, passes: dict[fx.Node, int]) -> Iterable[Loop]:
    """Move what only a later pass needs out of a loop, to loops of its own, which are returned."""
    first: dict[Loop, int] = {}
    for node in graph.nodes:
        if (loop := LOOP.get(node)) is not None:
            first[loop] = min(first.get(loop, passes[node]), passes[node])
    apart: dict[tuple[Loop, int], Loop] = {}
    for node in graph.nodes:
        if (loop := LOOP.get(node)) is not None and passes[node] > first[loop]:
            LOOP.set(node, apart.setdefault((loop, passes[node]), replace(loop)))
    return apart.values()


@dataclass
class _Versions:
    graph: fx.Graph
    passes: dict[fx.Node, int]
    budgeted: Set[fx.Node]
    nodes: dict[Version, fx.Node] = field(default_factory=dict)
    # From a version to the original node.
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    decided: dict[tuple[fx.Node, Policy], Decision] = field(default_factory=dict)
    # The loops in which versions of a loop's values are computed, by their depth and pass.
    loops: dict[tuple[Loop, int, int], Loop] = field(default_factory=dict)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self.passes[node]:
                self._serve(node)

    def _serve(self, reader: fx.Node) -> None:
        """Replace the operands of a backward node by the versions it should read."""
        now = self.passes[reader]
        for source in reader.all_input_nodes:
            if self.passes[source] < now:
                version = self._version(source, segments_of(reader), now)
                if version[1]:
                    self._ensure(version, reader)
                read = self._read(source, segments_of(reader), now)
                if read is not source:
                    reader.replace_input_with(source, read)

    def _version(self, node: fx.Node, reader: Segments, now: int) -> Version:
        """The version of a value that a reader in these segments reads."""
        if node.op == "placeholder":
            return node, 0, now
        mine = segments_of(node)
        shared = shared_segments(mine, reader)
        base = base_of(node)
        if base is not None:  # a view has the version of its base
            return node, self._version(base, mine[:shared], now)[1], now
        if is_effect(node):
            return node, 0, now
        if is_tuple(node):
            return node, shared, now
        deep = (i for i in range(shared, 0, -1) if self._decision(node, mine[i - 1]) != "save")
        return node, next(deep, 0), now

    # -- recomputing ----------------------------------------------------------------------------

    def _ensure(self, version: Version, reader: fx.Node) -> None:
        """Add a version and the versions it needs, ahead of the first reader, unless they exist."""
        stack = [version]
        while stack:
            missing = [v for v in self._needs(stack[-1]) if v[1] and v not in self.nodes]
            if missing and stack[-1] not in self.nodes:
                stack.extend(missing)
            elif (wanted := stack.pop()) not in self.nodes:
                self._make(wanted, reader)
                # What is recomputed for one iteration is recomputed for all that follow.
                if not self._is_offloaded(wanted):
                    stack += [(each, *wanted[1:]) for each in iterating(wanted[0])]

    def _needs(self, version: Version) -> Iterator[Version]:
        node, depth, now = version
        mine = segments_of(node)
        if self._is_offloaded(version):
            yield self._version(node, mine[: depth - 1], now)
            return
        for source in node.all_input_nodes:
            source = self.origin.get(source, source)
            if self.passes[source] < now:
                yield self._version(source, mine[:depth], now)

    def _is_offloaded(self, version: Version) -> bool:
        node, depth, _ = version
        if base_of(node) is not None or is_tuple(node):
            return False
        return self._decision(node, segments_of(node)[depth - 1]) == "offload"

    def _make(self, version: Version, reader: fx.Node) -> None:
        node, depth, now = version
        if self._is_offloaded(version):
            outer = self._version(node, segments_of(node)[: depth - 1], now)
            kept = self.nodes[outer] if outer[1] else node
            away = offload_after(kept)
            WHY.setdefault(away, Why(f"{segments_of(node)[depth - 1].policy} offloads it"))
            self.passes[away] = self.passes[kept]
            new = reload_before(reader, away)
        else:
            mine = segments_of(node)[:depth]

            def swap(source: fx.Node) -> fx.Node:
                source = self.origin.get(source, source)
                if self.passes[source] >= now:
                    return source
                return self._read(source, mine, now)

            with self.graph.inserting_before(reader):
                new = self.graph.node_copy(node, swap)
            tag_version(new, node, depth)
        _after_operands(new)
        if (loop := LOOP.get(node)) is not None:
            LOOP.set(new, self.loops.setdefault((loop, depth, now), replace(loop)))
        self.passes[new] = now
        self.origin[new] = node
        self.nodes[version] = new

    def _read(self, node: fx.Node, reader: Segments, now: int) -> fx.Node:
        """The node that a reader in these segments reads; its version exists already."""
        version = self._version(node, reader, now)
        if version[1]:
            return self.nodes[version]
        self._note(node, reader)
        return node

    # -- deciding -------------------------------------------------------------------------------

    def _decision(self, node: fx.Node, segment: Segment) -> Decision:
        node = handed_value(node)
        key = node, segment.policy
        if key not in self.decided:
            if isinstance(segment.policy, Budget):
                self.decided[key] = "save" if node in self.budgeted else "recompute"
            else:
                self.decided[key] = decide(node, segment.policy)
        return self.decided[key]

    def _note(self, node: fx.Node, reader: Segments) -> None:
        """Tag a value with the reason why the backward reads the original."""
        root = storage_of(node)
        WHY.setdefault(root, why_kept(segments_of(root), reader))


def is_effect(node: fx.Node) -> bool:
    """Whether a node is an effect or its result, which a backward does not compute again."""
    whole = node.all_input_nodes[0] if node.target is operator.getitem else node
    return isinstance(whole.target, Effect)


def _after_operands(node: fx.Node) -> None:
    """Move a node behind its operands: an iteration hands on what stands behind the first reader."""
    last = max(node.all_input_nodes, default=node)
    if node < last:
        last.append(node)


def decide(node: fx.Node, policy: Policy) -> Decision:
    """The decision of a policy on a value, by its label or the labels of its views.

    In a loop it is that of the first iteration, which all have.
    """
    return policy.over(*_facts(node))


def decisions(node: fx.Node, policy: Policy, iterations: Iterable[int]) -> Iterator[Decision]:
    """The decisions of a policy on a value in some iterations of its loop."""
    return (policy.over(*_facts(node, i)) for i in iterations)


def _facts(node: fx.Node, i: int = 0) -> tuple[str, Shapes, str, Sequence[str | None]]:
    """The arguments of a policy: operation, shapes, scope (of an iteration), and labels."""
    whole = node.all_input_nodes[0] if node.target is operator.getitem else node
    op = op_name(node)
    if KERNEL.on(whole):
        op = str(KERNEL.of(whole))
    if COLLECTIVE.on(whole):
        op = COLLECTIVE_PREFIX + op.rpartition(".")[2]
    operands = tuple(tuple(VAL.of(n).shape) for n in whole.all_input_nodes if _is_tensor(n))
    shapes = Shapes(operands, tuple(VAL.of(node).shape) if _is_tensor(node) else ())
    scope = SCOPE.get(node) or ""
    return op, shapes, in_iteration(scope, i) if LOOP.on(node) else scope, labels_of(node) or [None]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(VAL.get(node), torch.Tensor)


def tag_version(version: fx.Node, node: fx.Node, depth: int = 0) -> None:
    """Tag a version of a node: it is in the backward, and only in the segments after the first ones."""
    inherit(version, node, "call")
    put(version, {PHASE: "backward", RECOMPUTE: True, SEGMENTS: segments_of(node)[depth:]})
    record = COLLECTIVE.get(node)
    if record is not None:
        COLLECTIVE.set(version, record.in_backward())
