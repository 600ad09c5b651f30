"""fuse: what is written as several operations and run as one, said beside the function."""

from __future__ import annotations

from collections import UserString
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional.errors import KernelError, NoMatch
from torchard.functional.fused import Fused
from torchard.functional.program import Program
from torchard.functional.segments import Where, chooser, scopes_in
from torchard.functional.trace import trace
from torchard.functional.transform import Transformed
from torchard.kernels import library  # noqa: F401  (its kernels)
from torchard.kernels.buffers import is_large
from torchard.kernels.choice import COMPILERS
from torchard.kernels.joint import Pair, let_go_of_losses
from torchard.kernels.kernel import KERNELS, Kernel
from torchard.kernels.match import Finder, Found, Miss
from torchard.kernels.pattern import Pattern
from torchard.kernels.reading import Reading
from torchard.kernels.region import fused_of
from torchard.kernels.replace import Part, Replacement, Replacer, in_order
from torchard.kernels.report import Match, Use

__all__ = ["Fuse", "find", "fuse"]


def fuse(
    fn: Callable[..., Any],
    pattern: Any = None,
    kernel: Any = None,
    *,
    compiler: str = "inductor",
    where: Where | None = None,
    name: str | None = None,
) -> Transformed:
    """``fn``, with every occurrence of a pattern run as one kernel, however it is written there.

    Without a pattern, of every kernel of the library, where that moves fewer bytes. With one, of that:
    replaced by ``kernel``, or compiled by itself if there is none. In a program with gradients, those of
    what was found are found and replaced as well.

    Args:
        fn: a pure function.
        pattern: a function of tensors (see `Pattern`), a Pattern, or a Kernel.
        kernel: a function that computes the same, or a Kernel.
        compiler: of what has no implementation for its device: ``"inductor"`` (where eager operations are
            not faster: see ``.lower(...).kernels``) or ``"eager"``.
        where: only in these scopes: a pattern (``"block/*"``), several, or a function of the path.
        name: of the kernel, in reports and for policies; by default that of the pattern.

    Raises (when called):
        NoMatch: the pattern, or ``where``, is nowhere in fn; says what came nearest.
        KernelError: the kernel returns other shapes or dtypes than its pattern, or it has no vjp
            and gradients go through it.

    Raises:
        KernelError: an unknown compiler.
        PatternError: the pattern cannot be traced.

    Source: Slapo (Chen et al. 2023, arXiv:2302.08005) for patterns beside the model.
    """
    if compiler not in COMPILERS:
        raise KernelError(f"fuse(compiler={compiler!r}): the compilers are {', '.join(COMPILERS)}.")
    kernels = None if pattern is None else (_kernel(pattern, kernel, name),)
    places = None if where is None else _places(where)
    return Transformed(fn, (Fuse(kernels, compiler, places),))


def find(
    fn: Callable[..., Any], pattern: Any, *, where: Where | None = None
) -> Callable[..., list[Match]]:
    """``find(fn, pattern)(*args)`` lists the occurrences of a pattern, and of its gradient, in fn.

    Nothing is rewritten. The error of ``fuse(fn, pattern)`` says what came nearest where nothing is.
    """
    kernel = _kernel(pattern, None, None)
    fuse_ = Fuse((kernel,), "eager", None if where is None else _places(where))

    def found(*args: Any, **kwargs: Any) -> list[Match]:
        program = trace(fn)(*args, **kwargs)
        search = _Search(program, fuse_)
        return [
            Match.of(part, search.reading) for group in search.apart() for part in group.plan.parts
        ]

    return found


def _kernel(pattern: Any, kernel: Any, name: str | None) -> Kernel:
    if isinstance(pattern, Kernel):
        return pattern
    if isinstance(kernel, Kernel):
        references = (pattern, *kernel.references)
        return Kernel(
            name or kernel.name,
            references,
            kernel.dims,
            kernel.implementations,
            kernel.vjp,
            kernel.tolerance,
        )
    looked_for = pattern if isinstance(pattern, Pattern) else Pattern(pattern)
    called = name or looked_for.name
    if kernel is None:
        return Kernel(called, (looked_for,))
    return Kernel(called, (looked_for,), None, {"any": kernel}, None)


def _places(where: Where) -> tuple[Any, ...]:
    return (where,) if isinstance(where, str) or callable(where) else tuple(where)


@dataclass(frozen=True)
class Fuse:
    """The rewrite of ``fuse``.

    Attributes:
        kernels: those asked for; None for the library's.
        asked: inside of another trace, only nodes tagged with this very rewrite are its business.
    """

    kernels: tuple[Kernel, ...] | None
    compiler: str = "inductor"
    where: tuple[Any, ...] | None = None
    asked: bool = field(default=False)

    # What is fused is fused before it is split over a mesh, whatever the order of the transforms.
    stage = 0

    def annotate(self, program: Program) -> Program:
        """Check that what was asked for is there."""
        if self.where is not None:
            self._check_where(program)
        if self.kernels is not None:
            search = _Search(program, self)
            if not search.apart():
                raise NoMatch(_nothing(self.kernels[0], program, search))
        return program

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        let_go_of_losses(program)
        return _Search(program, self).carry_out()

    def inline(self, program: Program) -> Program:
        """Inside another trace: mark what it is about, to be done when that one is lowered."""
        program = program.copy()
        mine = Fuse(self.kernels, self.compiler, self.where, True)
        for node in program.calls:
            node.meta["fuse"] = (*node.meta.get("fuse", ()), mine)
        program.asks = tuple(dict.fromkeys((*program.asks, mine)))
        return program

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node is in what this is said of."""
        if self.asked and self not in node.meta.get("fuse", ()):
            return False
        if self.where is None:
            return True
        return _inside(str(node.meta.get("scope") or ""), self.where)

    def _check_where(self, program: Program) -> None:
        assert self.where is not None
        scopes = scopes_in(program)
        if not any(_inside(scope, self.where) for scope in scopes):
            shown = ", ".join(map(repr, scopes[:12])) or "none: label a part with scope('block/0')"
            raise NoMatch(
                f"fuse({program.name}, where={self.where}) matches no scope of it; there are {shown}."
            )


def _inside(scope: str, where: tuple[Any, ...]) -> bool:
    """Whether a scope, or one it lies in, is meant."""
    meant = chooser(where)
    parts = scope.split("/")
    return any(meant("/".join(parts[:i])) for i in range(1, len(parts) + 1))


def _nothing(kernel: Kernel, program: Program, search: _Search) -> str:
    thorough = Finder(search.reading, thorough=True)
    for pattern in kernel.patterns:
        thorough.find(pattern)
    misses = [thorough.misses[p] for p in kernel.patterns if p in thorough.misses]
    nearest = max(misses, key=lambda miss: miss.depth, default=None)
    why = f"nearest was {nearest}" if isinstance(nearest, Miss) else "nothing came near"
    if search.refused:
        why = f"it is there, but {search.refused[0]}"
    return (
        f"fuse({program.name}, {kernel.name}): the pattern is nowhere in it; {why}. "
        "find(fn, pattern)(*args) lists matches; print(trace(fn)(*args)) shows the operations."
    )


class _Search:
    """One rewrite at work on one program, whose graph it may change."""

    def __init__(self, program: Program, fuse_: Fuse) -> None:
        self.program, self.fuse = program, fuse_
        self.reading = Reading(program)
        self.finder = Finder(self.reading)
        labels = program.facts.get("wanted", ())
        self.replacer = Replacer(self.reading, lambda node: any(wanted(node) for wanted in labels))
        self.refused: list[str] = []

    def groups(self) -> list[_Group]:
        """What is there: occurrences together with those of their gradients, the largest first."""
        kernels = tuple(KERNELS.values()) if self.fuse.kernels is None else self.fuse.kernels
        found: list[_Group] = []
        for kernel in kernels:
            forward = self._occurrences(kernel, False)
            # Where nothing of a kernel is, hardly anything of its gradient is, and looking takes time.
            likely = forward or self.fuse.kernels is not None
            backward = kernel.gradient if likely and _has_backward(self.program) else None
            behind = [] if backward is None else self._occurrences(backward, True)
            for one in forward:
                mine = [g for g in behind if _is_gradient(g, one)]
                behind = [g for g in behind if g not in mine]
                through = bool(mine)
                if kernel.vjp is None:
                    mine = []
                found.append(_Group([(kernel, one), *((backward, g) for g in mine)], through))
            if kernel.vjp is not None:
                found += [_Group([(backward, g)]) for g in behind]
        for group in found:
            group.plan = self._plan(group)
        found.sort(key=lambda group: (-group.plan.operations, group.plan.after - group.plan.before))
        return found

    def _occurrences(self, kernel: Kernel, partly: bool) -> list[Found]:
        """By all of its references, each once."""
        found: dict[Any, Found] = {}
        for pattern in kernel.patterns:
            for one in self.finder.find(pattern, partly=partly):
                found.setdefault(frozenset(root.term for root in one.roots), one)
        return list(found.values())

    def _plan(self, group: _Group) -> Replacement:
        plan = self.replacer.plan([one for _, one in group.members])
        nodes = [node for part in plan.parts for node in part.firsts]
        if not plan.refused and not all(map(self.fuse.concerns, nodes)):
            plan.refused = "it is not where it was asked for"
        return plan

    def apart(self) -> list[_Group]:
        """Those whose results are not inside of one before them, nothing weighed."""
        taken: set[fx.Node] = set()
        kept = []
        for group in self._singly(self.groups()):
            firsts = {node for part in group.plan.parts for node in part.firsts}
            if group.plan.refused:
                self.refused.append(group.plan.refused)
            elif taken.isdisjoint(firsts):
                kept.append(group)
                taken |= group.plan.gone
        return kept

    def _singly(self, groups: list[_Group]) -> Iterator[_Group]:
        """Groups, and in place of those that cannot be replaced together, their members."""
        for group in groups:
            if not group.plan.refused or len(group.members) == 1:
                yield group
                continue
            for member in group.members:
                alone = _Group([member])
                alone.plan = self._plan(alone)
                yield alone

    def carry_out(self) -> Program:
        """Replace, the largest first; what has changed in the meantime is planned anew."""
        for group in self.groups():
            if not self._tried(group) and len(group.members) > 1:
                for member in group.members:
                    self._tried(_Group([member]))
        # A kernel stands where its first result was, maybe ahead of what it reads.
        in_order(self.program.graph)
        return self.program

    def _tried(self, group: _Group) -> bool:
        """Whether a group has been replaced."""
        if self._joined(group):
            return True
        plan = self._plan(group)
        if not self._accepted(plan):
            return False
        for (kernel, found), part in zip(group.members, plan.parts, strict=True):
            if kernel.vjp is None and kernel.of is None:
                self._check_gradient(kernel, part, group.differentiated)
            made = fused_of(kernel, found, self.fuse.compiler, self.reading)
            self._carry_out(part, kernel.name, *made)
        self.replacer.finish(plan)
        return True

    def _joined(self, group: _Group) -> bool:
        """Whether a kernel and its gradient have been replaced by one that is both.

        Not in a program that is to be split between them.
        """
        if len(group.members) != 2 or any(leaf.role == "cotangent" for leaf in self.program.inputs):
            return False
        (kernel, forward), (_, backward) = group.members
        pair = Pair(kernel, forward, backward)
        made = pair.fused(self.reading.device, self.fuse.compiler) if pair.found else None
        if pair.found is None or made is None:
            return False
        plan = self._plan(_Group([(kernel, pair.found)]))
        marked = any(node.meta.get("segments") for node in plan.gone)
        if marked or plan.refused or (self.fuse.kernels is None and not _worth(plan)):
            return False
        self._carry_out(plan.parts[0], pair.name, *made)
        self.replacer.finish(plan)
        return True

    def _accepted(self, plan: Replacement) -> bool:
        """The library's kernels have to be worth it; what was asked for by name is done."""
        if not plan.refused and self.fuse.kernels is None and not _worth(plan):
            plan.refused = f"it would move {plan.after:,} bytes instead of {plan.before:,}"
        if plan.refused:
            self.refused.append(plan.refused)
        return not plan.refused

    def _carry_out(self, part: Part, name: str, fused: Fused, how: UserString) -> None:
        self.replacer.carry_out(part, fused, {"kernel": name, "use": Use.of(name, how, part)})

    def _check_gradient(self, kernel: Kernel, part: Part, differentiated: bool) -> None:
        """A kernel without a derivative must not stand where one is taken."""
        first = part.firsts[0]
        inside = self.replacer.inside(part)
        readers = {user for node in inside for user in node.users}
        if differentiated or (not _is_backward(first) and any(map(_is_backward, readers))):
            raise KernelError(
                f"kernel {kernel.name!r} has no vjp, and {self.program.name} takes a gradient through it "
                f"({first.meta.get('source')}). Give it one, Kernel(..., vjp={{'any': f}}), or let it be "
                "its reference's: Kernel(..., vjp='reference')."
            )


@dataclass
class _Group:
    """Occurrences that are replaced together: of a kernel, and of its gradients."""

    members: list[tuple[Any, Found]]
    differentiated: bool = False
    plan: Replacement = field(default_factory=lambda: Replacement([]))


def _worth(plan: Replacement) -> bool:
    """Fewer bytes; or as many, by fewer operations than would be without it, or in better memory."""
    if plan.after != plan.before:
        return plan.after < plan.before
    return plan.operations > len(plan.parts) or any(map(_large_on_cpu, plan.results))


def _large_on_cpu(node: fx.Node) -> bool:
    """Whether it is worth having from us for the pages it lies in alone."""
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and is_large(val)


def _is_gradient(gradient: Found, of: Found) -> bool:
    """Whether one is the gradient of the other: of the same inputs."""
    names = of.pattern.inputs
    shared = [
        (value, of.inputs[names.index(name)])
        for name, value in zip(gradient.pattern.inputs, gradient.inputs, strict=True)
        if name in names
    ]
    return bool(shared) and all(a.term is b.term for a, b in shared)


def _has_backward(program: Program) -> bool:
    return any(node.meta.get("phase") == "backward" for node in program.calls) or any(
        leaf.role == "cotangent" for leaf in program.inputs
    )


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("phase") == "backward"
