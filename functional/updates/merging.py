"""Merging: the updates of many parameters become one operation of a program."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import HALVES, LAYOUT, LOOP, VAL
from torchard.functional.programs.unrolled import unrolled
from torchard.functional.updates.templates import Member, member_of

__all__ = ["with_updates"]

_DEVICES = ("cpu", "cuda")
# Gradients, and values before an update, are held until it is computed: so not all are by one call.
_LEAST_BYTES, _MOST_CALLS = 2**22, 16


def with_updates(program: Program) -> Program:
    """The program as it runs: with one operation for the updates of many parameters.

    A backward may read what an update computes, and a compiler may not know updates: these programs stay
    as they are.
    """
    known = program.compiler is None or program.compiler.runs_updates
    if not known or program.is_joint or HALVES.on(program.output):
        return program
    found = [m for m in map(member_of, program.calls) if m is not None]
    if any(LOOP.on(m.results[0]) for m in found):
        if program.compiler is not None and program.compiler.keeps_loops:
            found = [m for m in found if not LOOP.on(m.results[0])]
        else:  # a layer's updates in an iteration: one kernel for all layers is faster
            return with_updates(unrolled(program))
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    members = list(_apart(m for m in found if _may_merge(m, order)))
    if not members:
        return program
    merged = _Merged(fx.Graph(), members)
    for node in program.graph.nodes:
        merged.add(node)
    numbers = {node for member in members for node in member.numbers}
    for node in sorted(numbers, key=order.__getitem__, reverse=True):
        if not merged.env[node].users:
            merged.copy.erase_node(merged.env[node])
    return replace(program, graph=merged.copy)


def _apart(members: Iterable[Member]) -> Iterator[Member]:
    """The updates that share no operation with an earlier one."""
    taken: set[fx.Node] = set()
    for member in members:
        if taken.isdisjoint(member.inside):
            taken |= member.inside
            yield member


def _may_merge(member: Member, order: dict[fx.Node, int]) -> bool:
    """Whether a kernel can compute an update, and nothing reads what it does not return."""
    return _alike(member) and _closed(member, order)


def _alike(member: Member) -> bool:
    """Whether a kernel reads tensors like these."""
    wide = (*member.bases, member.grad, *member.results)
    vals: list[Any] = [VAL.get(node) for node in wide]
    first = vals[0]
    if not all(isinstance(x, torch.Tensor) for x in vals) or not first.ndim:
        return False
    same = all((x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device) for x in vals)
    placed = all(LAYOUT.get(node) == LAYOUT.get(wide[0]) for node in wide)
    known = first.dtype in member.update.dtypes and first.device.type in _DEVICES
    pairs = zip(member.bases, member.results, strict=True)
    ordered = all(VAL.of(old).stride() == VAL.of(new).stride() for old, new in pairs)
    return same and placed and known and ordered and _shared(member, first)


def _shared(member: Member, first: torch.Tensor) -> bool:
    """Whether what all parameters share are numbers, or tensors that a kernel reads as exactly."""
    tensors = [VAL.of(x) for x in member.shared if isinstance(x, fx.Node)]
    exact = (torch.float64,) if first.dtype == torch.float64 else (torch.float32, torch.float64)
    if any(x.ndim or x.dtype not in exact for x in tensors):
        return False
    # Kernels on other devices read float32 rates.
    return first.dtype != torch.float64 or first.device.type == "cpu" or len(tensors) < len(member.shared)


def _closed(member: Member, order: dict[fx.Node, int]) -> bool:
    """Whether nothing outside reads an intermediate value, or a result before all are computed."""
    last = order[member.results[0]]
    for node in member.inside:
        outside = [user for user in node.users if user not in member.inside]
        if node in member.results:
            if any(order[user] < last for user in outside):
                return False
        elif outside:
            return False
    return True


@dataclass
class _Merged:
    """Copies a graph, with one operation for updates that can be computed at once.

    An update waits for further ones until something reads a result of it.
    """

    copy: fx.Graph
    members: list[Member]
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # The updates that wait, by what they must have in common.
    waiting: dict[Hashable, list[Member]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of = {node: member for member in self.members for node in member.inside}
        self.roots = {member.results[0]: member for member in self.members}

    def add(self, node: fx.Node) -> None:
        """Add a node of the original graph, or have it wait."""
        member = self.of.get(node)
        for operand in node.all_input_nodes:
            other = self.of.get(operand)
            if other is not None and other is not member and operand not in self.env:
                self._compute(_key(other))
        if member is None:
            self.env[node] = self.copy.node_copy(node, self.env.__getitem__)
        elif node in self.roots:
            self.waiting.setdefault(_key(member), []).append(member)

    def _compute(self, key: Hashable) -> None:
        """Add the operations of the updates that wait."""
        waiting = self.waiting.pop(key)
        least = max(sum(map(_bytes, waiting)) // _MOST_CALLS, _LEAST_BYTES)
        while waiting:
            sizes = itertools.accumulate(map(_bytes, waiting))
            count = next((n for n, size in enumerate(sizes, 1) if size >= least), len(waiting))
            self._call(waiting[:count])
            waiting = waiting[count:]

    def _call(self, members: Sequence[Member]) -> None:
        """Add one operation for several updates."""
        first, env = members[0], self.env
        width = first.update.width
        old = [member.results[k] for k in range(width) for member in members]
        bases = [env[member.bases[k]] for k in range(width) for member in members]
        grads = [env[member.grad] for member in members]
        shared = [env[x] if isinstance(x, fx.Node) else x for x in first.shared]
        update, args = first.update, (bases, grads, *shared)
        call = self.copy.create_node("call_function", update, args, name=update.kind)
        inherit(call, first.results[0], "place")
        VAL.set(call, tuple(map(VAL.of, old)))
        if LAYOUT.on(old[0]):
            LAYOUT.set(call, tuple(map(LAYOUT.of, old)))
        for k, node in enumerate(old):
            env[node] = self.copy.call_function(getitem, (call, k))
            inherit(env[node], node, "value")


def _bytes(member: Member) -> int:
    return int(VAL.of(member.grad).nbytes)


def _key(member: Member) -> Hashable:
    """What updates have in common that one kernel computes."""
    first = member.bases[0]
    val: Any = VAL.of(first)
    layout = LAYOUT.get(first)
    place = None if layout is None else (layout.axes, layout.home)  # where it is computed
    return member.update, member.shared, val.dtype, val.device, place
