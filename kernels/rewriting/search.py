"""Search: one call of fuse at work on one program: what is there, what is worth it, and the doing."""

from __future__ import annotations

from collections import UserString
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from torchard.functional.core.errors import KernelError
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import KERNEL, PHASE, SEGMENTS, SOURCE, USE, VAL
from torchard.kernels.execution.buffers import is_large
from torchard.kernels.patterns.gradient import RESULT
from torchard.kernels.patterns.kernel import KERNELS, Kernel
from torchard.kernels.patterns.match import Finder, Occurrence
from torchard.kernels.rewriting.fused_loss_grad import Pair
from torchard.kernels.rewriting.near_misses import Misses
from torchard.kernels.rewriting.post_passes import in_any_layout, in_order
from torchard.kernels.rewriting.region import fused_of
from torchard.kernels.rewriting.replace import REPLACED, Part, Replacement, Replacer
from torchard.kernels.rewriting.report import Missed, Use
from torchard.kernels.terms.reading import Reading

__all__ = ["Group", "Search"]

_PATIENCE = 20


@dataclass
class Group:
    """Occurrences that are replaced together: of a kernel, and of its gradients."""

    members: list[tuple[Any, Occurrence]]
    differentiated: bool = False
    plan: Replacement = field(default_factory=lambda: Replacement([]))


class Request(Protocol):
    """What a call of fuse asks for."""

    @property
    def kernels(self) -> tuple[Kernel, ...] | None:
        """The kernels to look for; None for the library's."""

    @property
    def compiler(self) -> str:
        """The compiler of kernels without an implementation of their own."""

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node is in what is asked about."""


class Search:
    """One rewrite at work on one program, whose graph it may change."""

    def __init__(self, program: Program, request: Request) -> None:
        self.program, self.request = program, request
        self.kernels = tuple(KERNELS.values()) if request.kernels is None else request.kernels
        self.reading = Reading(program)
        # What was asked for by name is worth more.
        self.finder = Finder(self.reading, patience=1 if request.kernels is None else _PATIENCE)
        stack = program.stack
        self.replacer = Replacer(self.reading, lambda node: any(r.wants(node) for r in stack))
        self.refused: list[tuple[fx.Node, Missed]] = []
        self.stopped: list[Missed] = []

    def groups(self) -> list[Group]:
        """What is there: occurrences together with those of their gradients, the largest first."""
        found: list[Group] = []
        for kernel in self.kernels:
            forward = self._occurrences(kernel, False)
            # Where nothing of a kernel is, hardly anything of its gradient is, and looking takes time.
            likely = forward or self.request.kernels is not None
            backward = kernel.gradient if likely and _has_backward(self.program) else None
            behind = [] if backward is None else self._occurrences(backward, True)
            for one in forward:
                mine = [g for g in behind if _is_gradient(g, one)]
                behind = [g for g in behind if g not in mine]
                through = bool(mine)
                if kernel.vjp is None:
                    mine = []
                found.append(Group([(kernel, one), *((backward, g) for g in mine)], through))
            if kernel.vjp is not None:
                found += [Group([(backward, g)]) for g in behind]
        for group in found:
            group.plan = self._plan(group)
        found.sort(key=lambda group: (-group.plan.operations, group.plan.after - group.plan.before))
        return found

    def _occurrences(self, kernel: Kernel, partly: bool) -> list[Occurrence]:
        """By all of its references, each once."""
        found: dict[Any, Occurrence] = {}
        for pattern in kernel.patterns:
            for one in self.finder.find(pattern, partly=partly):
                found.setdefault(frozenset(root.term for root in one.roots), one)
            if pattern in self.finder.stopped:
                self.stopped.append(Missed(kernel.name, "", "", "forward", self._gave_up()))
        return list(found.values())

    def _gave_up(self) -> str:
        return (
            f"the search was given up after {self.finder.effort.limit:,} steps, as too many values look "
            "alike; ask for the kernel by name, fuse(fn, kernel), or say where, fuse(fn, where=...)"
        )

    def _plan(self, group: Group) -> Replacement:
        plan = self.replacer.plan([one for _, one in group.members])
        nodes = [node for part in plan.parts for node in part.firsts]
        if not plan.refused and not all(map(self.request.concerns, nodes)):
            plan.refused = "it is not where it was asked for"
        return plan

    def apart(self) -> list[Group]:
        """Those whose results are not inside of one before them, nothing weighed."""
        taken: set[fx.Node] = set()
        kept = []
        for group in self._singly(self.groups()):
            firsts = {node for part in group.plan.parts for node in part.firsts}
            if group.plan.refused:
                self._refused(group)
            elif taken.isdisjoint(firsts):
                kept.append(group)
                taken |= group.plan.gone
        return kept

    def _singly(self, groups: list[Group]) -> Iterator[Group]:
        """Groups, and in place of those that cannot be replaced together, their members."""
        for group in groups:
            if not group.plan.refused or len(group.members) == 1:
                yield group
                continue
            for member in group.members:
                alone = Group([member])
                alone.plan = self._plan(alone)
                yield alone

    def carry_out(self) -> Program:
        """Replace, the largest first; what has changed in the meantime is planned anew."""
        for group in self.groups():
            if not self._tried(group) and len(group.members) > 1:
                for member in group.members:
                    self._tried(Group([member]))
        # A kernel stands where its first result was, maybe ahead of what it reads.
        in_order(self.program.graph)
        in_any_layout(self.program.graph)
        return self.program

    def missed(self, before: Program) -> Misses:
        """What has been left alone of a program that is as this one was."""
        erased = self.replacer.erased
        refused = [one for node, one in self.refused if node not in erased] + self.stopped
        used = frozenset(str(use) for use in self.program.kernels)
        gone = frozenset(node.name for node in erased)
        return Misses(before, self.kernels, self.request.concerns, refused, used, gone)

    def _tried(self, group: Group) -> bool:
        """Whether a group has been replaced."""
        if self._joined(group):
            return True
        plan = self._plan(group)
        if not self._accepted(plan):
            group.plan = plan
            self._refused(group)
            return False
        for (kernel, found), part in zip(group.members, plan.parts, strict=True):
            if kernel.vjp is None and kernel.of is None:
                self._check_gradient(kernel, part, group.differentiated)
            made = fused_of(kernel, found, self.request.compiler, self.reading)
            self._carry_out(part, kernel.name, *made)
        self.replacer.finish(plan)
        return True

    def _joined(self, group: Group) -> bool:
        """Whether a kernel and its gradient have been replaced by one that is both.

        Not in a program that is to be split between them.
        """
        if len(group.members) != 2 or any(leaf.role == "cotangent" for leaf in self.program.inputs):
            return False
        (kernel, forward), (_, backward) = group.members
        pair = Pair(kernel, forward, backward)
        made = pair.fused(self.reading.device, self.request.compiler) if pair.found else None
        if pair.found is None or made is None:
            return False
        plan = self._plan(Group([(kernel, pair.found)]))
        marked = any(SEGMENTS.get(node) for node in plan.gone)
        if marked or plan.refused or (self.request.kernels is None and not _worth(plan)):
            return False
        self._carry_out(plan.parts[0], pair.name, *made)
        self.replacer.finish(plan)
        return True

    def _accepted(self, plan: Replacement) -> bool:
        """The library's kernels have to be worth it; what was asked for by name is done."""
        if not plan.refused and self.request.kernels is None and not _worth(plan):
            plan.refused = self._unworthy(plan)
        return not plan.refused

    def _unworthy(self, plan: Replacement) -> str:
        why = f"it would move {plan.after:,} bytes instead of {plan.before:,}"
        inside = [node for part in plan.parts for node in self.replacer.inside(part) - plan.gone]
        kept = min(inside, key=self.replacer.order.__getitem__, default=None)
        return why if kept is None else f"{why}: a value inside is read elsewhere, {_place(kept)}"

    def _refused(self, group: Group) -> None:
        """Note it, unless its members are tried one by one, or nothing would go on its account."""
        plan = group.plan
        idle = plan.refused == REPLACED or (plan.after and plan.before in (0, plan.after))
        if len(group.members) > 1 or idle:
            return
        ((kernel, found),) = group.members
        order = self.reading.order  # of what was there before any kernel
        node = next(n for n in self.reading.nodes[found.roots[0].term] if n in order)
        if kernel.of is not None or not _is_backward(node):  # gradients have a form of their own
            self.refused.append((node, Missed.of(kernel.name, node, plan.refused)))

    def _carry_out(self, part: Part, name: str, fused: Fused, how: UserString) -> None:
        self.replacer.carry_out(part, fused, {KERNEL: name, USE: Use.of(name, how, part)})

    def _check_gradient(self, kernel: Kernel, part: Part, differentiated: bool) -> None:
        """A kernel without a derivative must not stand where one is taken."""
        first = part.firsts[0]
        inside = self.replacer.inside(part)
        readers = {user for node in inside for user in node.users}
        if differentiated or (not _is_backward(first) and any(map(_is_backward, readers))):
            raise KernelError(
                f"kernel {kernel.name!r} has no vjp, and {self.program.name} takes a gradient through it "
                f"({SOURCE.get(first)}). Give it one, Kernel(..., vjp={{'any': f}}), or let it be "
                "its reference's: Kernel(..., vjp='reference')."
            )


def _place(node: fx.Node) -> str:
    return str(SOURCE.get(node) or node.name)


def _worth(plan: Replacement) -> bool:
    """Fewer bytes; or as many, by fewer operations than would be without it, or in better memory."""
    if plan.after != plan.before:
        return plan.after < plan.before
    return plan.operations > len(plan.parts) or any(map(_large_on_cpu, plan.results))


def _large_on_cpu(node: fx.Node) -> bool:
    """Whether it is worth having from us for the pages it lies in alone."""
    val = VAL.of(node)
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and is_large(val)


def _is_gradient(gradient: Occurrence, of: Occurrence) -> bool:
    """Whether one is the gradient of the other: of the same inputs and outputs."""
    known = dict(zip(of.pattern.inputs, (value.term for value in of.inputs), strict=True))
    known |= {f"{RESULT}{root.output}": root.value.term for root in of.roots}
    read = zip(gradient.pattern.inputs, gradient.inputs, strict=True)
    shared = [value.term is known[name] for name, value in read if name in known]
    return bool(shared) and all(shared)


def _has_backward(program: Program) -> bool:
    return any(PHASE.get(node) == "backward" for node in program.calls) or any(
        leaf.role == "cotangent" for leaf in program.inputs
    )


def _is_backward(node: fx.Node) -> bool:
    return PHASE.get(node) == "backward"
