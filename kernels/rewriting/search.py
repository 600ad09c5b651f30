"""The search of one call of fuse in one program: occurrences are found, chosen and replaced."""

from __future__ import annotations

from collections import UserString
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from torchard.functional.core.errors import KernelError
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import KERNEL, PHASE, SEGMENTS, SOURCE, USE
from torchard.kernels.patterns.gradient import RESULT
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Finder, Occurrence
from torchard.kernels.rewriting.fused_loss_grad import Pair
from torchard.kernels.rewriting.plan import REPLACED, Part, Replacement
from torchard.kernels.rewriting.post_passes import in_any_layout, in_order
from torchard.kernels.rewriting.region import fused_of
from torchard.kernels.rewriting.replace import Replacer
from torchard.kernels.rewriting.report import Missed, Use
from torchard.kernels.rewriting.worth import SMALL, Profitability, moves_less
from torchard.kernels.terms.reading import Reading
from torchard.kernels.terms.terms import Term

__all__ = ["Group", "Search"]

_PATIENCE = 20


@dataclass
class Group:
    """Occurrences that are replaced at once: of a kernel, and of its gradients.

    Attributes:
        members: the kernels and their occurrences.
        differentiated: whether there are gradients, also if they are not replaced.
    """

    members: list[tuple[Any, Occurrence]]
    differentiated: bool = False
    plan: Replacement = field(default_factory=lambda: Replacement([]))


@dataclass(frozen=True)
class _Joined:
    """A kernel and its gradient as one kernel: its name, its target and label, and its replacement."""

    name: str
    fused: tuple[Fused, UserString]
    plan: Replacement


class Request(Protocol):
    """The request of a call of fuse."""

    @property
    def kernels(self) -> tuple[Kernel, ...] | None:
        """The kernels to look for; None for the library's."""

    @property
    def compiler(self) -> str:
        """The compiler of kernels without an implementation of their own."""

    @property
    def looked_for(self) -> tuple[Kernel, ...]:
        """The kernels to look for, or all of the library's."""

    @property
    def by_time(self) -> bool:
        """Whether kernels must be faster, not only move fewer bytes."""

    @property
    def of_all(self) -> Request:
        """The same request for kernels that only move fewer bytes."""

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node is in the requested scopes."""


class Search:
    """The search of one rewrite in one program, whose graph it may change."""

    def __init__(self, program: Program, request: Request) -> None:
        self.program, self.request = program, request
        self.kernels, self.profitability = request.looked_for, Profitability(program)
        if request.by_time:
            worth = self.profitability
            self.kernels = tuple(k for k in self.kernels if not worth.why_not_tried(k))
        self.reading = Reading(program)
        # Kernels requested by name are given more effort.
        self.finder = Finder(self.reading, patience=1 if request.kernels is None else _PATIENCE)
        stack = program.stack
        self.replacer = Replacer(self.reading, lambda node: any(r.wants(node) for r in stack))
        self.refused: list[tuple[fx.Node, Missed]] = []
        self.stopped: list[Missed] = []
        # The names of the kernels; by the name of its first result, why one was not used.
        self.used: set[str] = set()
        self.reasons: dict[str, str] = {}

    def groups(self) -> list[Group]:
        """Occurrences grouped with those of their gradients, the largest group first."""
        groups: list[Group] = []
        for kernel in self.kernels:
            forward = [] if kernel.gradient_only else self._occurrences(kernel, False)
            # Without a kernel's occurrence one of its gradient is unlikely, and searching takes time.
            likely = forward or kernel.gradient_only or self.request.kernels is not None
            backward = kernel.gradient if likely and _has_backward(self.program) else None
            gradients = [] if backward is None else self._occurrences(backward, True, forward)
            for occurrence in forward:
                mine = [g for g in gradients if _is_gradient(g, occurrence)]
                gradients = [g for g in gradients if g not in mine]
                differentiated = bool(mine)
                if kernel.vjp is None:
                    mine = []
                members = [(kernel, occurrence), *((backward, g) for g in mine)]
                groups.append(Group(members, differentiated))
            if kernel.vjp is not None:
                groups += [Group([(backward, g)]) for g in gradients]
        for group in groups:
            group.plan = self._plan(group)
        groups.sort(key=lambda group: (-group.plan.operations, group.plan.after - group.plan.before))
        return groups

    def _occurrences(
        self, kernel: Kernel, partly: bool, of: Sequence[Occurrence] = ()
    ) -> list[Occurrence]:
        """The distinct occurrences of all references of a kernel.

        Args:
            partly: whether some of the outputs suffice.
            of: the occurrences whose gradient the kernel is. Their references' gradients are looked for
                first, and no others if each of them has one.
        """
        occurrences: dict[Any, Occurrence] = {}
        least = self.profitability.least_elements(kernel) if self.request.by_time else 0
        whole: set[Term] = set()
        first = {occurrence.pattern for occurrence in of}
        for pattern in sorted(kernel.patterns, key=lambda pattern: pattern.origin not in first):
            if first and pattern.origin not in first and _have_gradients(of, occurrences.values()):
                break
            for found in self.finder.find(pattern, partly=partly, least=least, known=whole):
                roots = frozenset(root.term for root in found.roots)
                occurrences.setdefault(roots, found)
                if found.is_whole:
                    whole |= roots
            if pattern in self.finder.stopped:
                self.stopped.append(Missed(kernel.name, "", "", "forward", self._gave_up()))
        return list(occurrences.values())

    def _gave_up(self) -> str:
        return (
            f"the search was stopped after {self.finder.effort.limit:,} steps, because too many values "
            "look alike; name the kernel, fuse(fn, kernel), or the scopes, fuse(fn, where=...)"
        )

    def _plan(self, group: Group) -> Replacement:
        plan = self.replacer.plan([occurrence for _, occurrence in group.members])
        nodes = [node for part in plan.parts for node in part.firsts]
        if not plan.refused and not all(map(self.request.concerns, nodes)):
            plan.refused = "it is outside the scopes that are fused"
        return plan

    def apart(self) -> list[Group]:
        """The groups whose results are not inside an earlier group, whether or not they pay."""
        taken: set[fx.Node] = set()
        kept = []
        for group in self._singly(self.groups()):
            firsts = {node for part in group.plan.parts for node in part.firsts}
            if group.plan.refused:
                self.refuse(group)
            elif taken.isdisjoint(firsts):
                kept.append(group)
                taken |= group.plan.gone
        return kept

    def _singly(self, groups: list[Group]) -> Iterator[Group]:
        """The groups; a group that cannot be replaced at once is divided into its members."""
        for group in groups:
            if not group.plan.refused or len(group.members) == 1:
                yield group
                continue
            for member in group.members:
                alone = Group([member])
                alone.plan = self._plan(alone)
                yield alone

    def carry_out(self) -> Program:
        """Replace groups, the largest first, each planned again on the current graph."""
        for group in self.groups():
            if not self._tried(group) and len(group.members) > 1:
                # The gradient first: it may read what is inside the forward.
                for member in reversed(group.members):
                    self._tried(Group([member]))
        # A kernel is inserted at its first result, maybe before its operands.
        in_order(self.program.graph)
        in_any_layout(self.program.graph)
        return self.program

    def _tried(self, group: Group) -> bool:
        """Replace a group if that is possible and pays; return whether its members need not be tried."""
        pair = self._pair(group)
        plan = self._plan(group) if pair is None else pair.plan
        if plan.refused or not (self.request.kernels is not None or moves_less(plan)):
            group.plan = plan
            self.refuse(group)
            return False
        trial = None
        if self.request.by_time:
            if why := self.profitability.why_as_written(group.members, plan):
                self._leave(plan, why)
                return why == SMALL
            trial = self.profitability.trial_of(plan)
        if pair is None:
            self._replace(group, plan)
        else:
            self._carry_out(plan.parts[0], pair.name, *pair.fused)
        turned = self.replacer.turned
        if trial and not trial.pays(self.replacer.inserted, [turned[n] for n in plan.results]):
            self.replacer.undo()
            self._leave(plan, "faster")
            return False
        self.replacer.finish(plan)
        self.used |= {kernel.name for kernel, _ in group.members}
        return True

    def _leave(self, plan: Replacement, why: str) -> None:
        """Leave operations as they are written."""
        self.reasons.update((part.firsts[0].name, why) for part in plan.parts)

    def _replace(self, group: Group, plan: Replacement) -> None:
        for (kernel, occurrence), part in zip(group.members, plan.parts, strict=True):
            if kernel.vjp is None and kernel.of is None:
                self._check_gradient(kernel, part, group.differentiated)
            fused, label = fused_of(kernel, occurrence, self.request.compiler, self.reading)
            self._carry_out(part, kernel.name, fused, label)

    def _pair(self, group: Group) -> _Joined | None:
        """A kernel and its gradient as one kernel, if that is possible and moves fewer bytes.

        Not in a program that will be split into forward and backward.
        """
        if len(group.members) != 2 or self.program.is_joint:
            return None
        (kernel, forward), (_, backward) = group.members
        pair = Pair(kernel, forward, backward)
        fused = pair.fused(self.reading.device, self.request.compiler) if pair.merged else None
        if pair.merged is None or fused is None:
            return None
        plan = self._plan(Group([(kernel, pair.merged)]))
        marked = any(SEGMENTS.get(node) for node in plan.gone)
        if marked or plan.refused or (self.request.kernels is None and not moves_less(plan)):
            return None
        return _Joined(pair.name, fused, plan)

    def _unworthy(self, plan: Replacement) -> str:
        why = f"it would move {plan.after:,} bytes instead of {plan.before:,}"
        inside = [node for part in plan.parts for node in self.replacer.inside(part) - plan.gone]
        kept = min(inside, key=self.replacer.order.__getitem__, default=None)
        return why if kept is None else f"{why}: a value inside is read elsewhere, {_place(kept)}"

    def refuse(self, group: Group) -> None:
        """Record a refusal, unless members are tried singly or no node would be erased."""
        plan = group.plan
        plan.refused = plan.refused or self._unworthy(plan)
        idle = plan.refused == REPLACED or (plan.after and plan.before in (0, plan.after))
        if len(group.members) > 1 or idle:
            return
        ((kernel, occurrence),) = group.members
        order = self.reading.order  # the original nodes only
        node = next(n for n in self.reading.nodes[occurrence.roots[0].term] if n in order)
        # In a backward, occurrences of the kernel's gradient are looked for instead.
        if kernel.of is not None or not _is_backward(node):
            self.refused.append((node, Missed.of(kernel.name, node, plan.refused)))

    def _carry_out(self, part: Part, name: str, fused: Fused, how: UserString) -> None:
        self.replacer.carry_out(part, fused, {KERNEL: name, USE: Use.of(name, how, part)})

    def _check_gradient(self, kernel: Kernel, part: Part, differentiated: bool) -> None:
        """Raise an error if a derivative is taken through a kernel that has none."""
        first = part.firsts[0]
        inside = self.replacer.inside(part)
        readers = {user for node in inside for user in node.users}
        if differentiated or (not _is_backward(first) and any(map(_is_backward, readers))):
            raise KernelError(
                f"kernel {kernel.name!r} has no vjp, and {self.program.name} takes a gradient through "
                f"it ({SOURCE.get(first)}). Give it one, Kernel(..., vjp={{'any': f}}), or use its "
                "reference's, Kernel(..., vjp='reference')."
            )


def _place(node: fx.Node) -> str:
    return str(SOURCE.get(node) or node.name)


def _is_gradient(gradient: Occurrence, of: Occurrence) -> bool:
    """Whether an occurrence is the gradient of another: it has the same inputs and outputs."""
    known = dict(zip(of.pattern.inputs, (value.term for value in of.inputs), strict=True))
    known |= {f"{RESULT}{root.output}": root.value.term for root in of.roots}
    read = zip(gradient.pattern.inputs, gradient.inputs, strict=True)
    shared = [value.term is known[name] for name, value in read if name in known]
    return bool(shared) and all(shared)


def _have_gradients(forward: Sequence[Occurrence], found: Iterable[Occurrence]) -> bool:
    """Whether each of some occurrences has a gradient with all of its outputs."""
    whole = [gradient for gradient in found if gradient.is_whole]
    return all(any(_is_gradient(gradient, one) for gradient in whole) for one in forward)


def _has_backward(program: Program) -> bool:
    return program.is_joint or any(map(_is_backward, program.calls))


def _is_backward(node: fx.Node) -> bool:
    return PHASE.get(node) == "backward"
