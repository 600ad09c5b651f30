"""fuse and find: occurrences of patterns in a function, run as kernels or listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import KernelError, NoMatch
from torchard.functional.engine.transformed import Transformed
from torchard.functional.loops.call import in_bodies
from torchard.functional.programs.program import Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import SCOPE
from torchard.functional.programs.unrolled import pattern_pass
from torchard.functional.remat.segments import Where, chooser, scopes_in
from torchard.functional.trace import trace
from torchard.kernels import library  # noqa: F401  (registers its kernels)
from torchard.kernels.execution.autotune import COMPILERS
from torchard.kernels.patterns.derivations import DERIVATIONS
from torchard.kernels.patterns.kernel import KERNELS, Kernel
from torchard.kernels.patterns.match import Finder
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.rewriting.findings import Findings
from torchard.kernels.rewriting.fused_loss_grad import let_go_of_losses
from torchard.kernels.rewriting.post_passes import each_its_own
from torchard.kernels.rewriting.report import Match
from torchard.kernels.rewriting.search import Search
from torchard.kernels.rewriting.tags import FUSE

__all__ = ["Fuse", "find", "fuse"]


@checked
def fuse(
    fn: Callable[..., Any],
    pattern: Pattern | Kernel | Callable[..., Any] | None = None,
    kernel: Kernel | Callable[..., Any] | None = None,
    *,
    compiler: str = "inductor",
    prefer: Literal["time", "memory"] = "time",
    where: Where | None = None,
    name: str | None = None,
) -> Transformed:
    """Run every match of a pattern in a function as one kernel, however it is written there.

    Without a pattern, the library's kernels, and those that are registered when a call is traced, are
    searched for. A kernel takes the place of operations where the program is faster with it, by a trial
    on tensors of these shapes; else they stay as they are written. With a pattern, its matches run as
    ``kernel``, or are compiled. Gradients are fused as well.

    Args:
        fn: a pure function of pytrees.
        pattern: a function of tensors (see `Pattern`), a Pattern, or a Kernel.
        kernel: a function that computes the same values as the pattern, or a Kernel.
        compiler: for kernels without an implementation for the device: ``"inductor"`` (on a CPU, only if
            it is faster than eager operations; see ``.lower(...).kernels``) or ``"eager"``.
        prefer: without a pattern, which kernels are used: those with which the program is faster
            (``"time"``), or those that move fewer bytes (``"memory"``), which also hold fewer.
        where: the scopes to search: a pattern of scopes (``"block/*"``), several, or a function of the
            scope's path.
        name: the kernel's name in reports and for policies; by default that of the pattern.

    Returns:
        A function that computes the same as ``fn``, with ``.lower`` and ``.lower_joint``.

    Raises:
        KernelError: the compiler is unknown, or a kernel or a name is given without a pattern, or in
            addition to a Kernel, which already has both. When called: the kernel returns different shapes
            or dtypes from the pattern, or has no vjp and a gradient is taken through it.
        PatternError: the pattern cannot be traced.
        NoMatch (when called): the pattern does not occur in ``fn``, or ``where`` matches none of its
            scopes; the message names the nearest miss.

    Source: Slapo, Chen et al., arXiv:2302.08005, for patterns that are separate from the model.

    >>> import torch, torchard as ta
    >>> def model(x, w, b):
    ...     return torch.relu(b + x @ w)
    >>> def biased_relu(x, b):
    ...     return torch.relu(x + b)
    >>> fused = ta.fuse(model, biased_relu, lambda x, b: (x + b).relu_())
    >>> fused(torch.ones(1, 2), torch.ones(2, 2), torch.tensor([-5.0, 5.0]))
    tensor([[0., 7.]])
    >>> args = torch.ones(8, 4), torch.ones(4, 4), torch.ones(4)
    >>> [node.name for node in ta.trace(model)(*args).calls]
    ['mm', 'add', 'relu']
    >>> [node.name for node in fused.lower(*args).calls]
    ['mm', 'biased_relu']
    """
    if compiler not in COMPILERS:
        raise KernelError(f"fuse(compiler={compiler!r}): the compilers are {', '.join(COMPILERS)}.")
    _check_used(pattern, kernel, name)
    kernels = None if pattern is None else (_kernel(pattern, kernel, name),)
    scopes = None if where is None else _as_tuple(where)
    return Transformed(fn, (Fuse(kernels, compiler, scopes, prefer),))


@checked
def find(
    fn: Callable[..., Any],
    pattern: Pattern | Kernel | Callable[..., Any],
    *,
    where: Where | None = None
) -> Callable[..., list[Match]]:
    """List the matches of a pattern, and of its gradient, in a function. Nothing is rewritten.

    Args:
        fn: a pure function of pytrees.
        pattern: as for `fuse`.
        where: as for `fuse`.

    Returns:
        A function of ``fn``'s arguments that returns a list of matches. If the list is empty, the error
        of ``fuse(fn, pattern)`` names the nearest miss.

    Raises:
        PatternError: the pattern cannot be traced.

    >>> import torch, torchard as ta
    >>> def biased_gelu(x, b):
    ...     return torch.nn.functional.gelu(x + b)
    >>> def mlp(x, w, b):
    ...     return ta.nn.gelu(ta.nn.linear(x, w, b))
    >>> matches = ta.find(mlp, biased_gelu)(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
    >>> len(matches)
    1
    """
    kernel = _kernel(pattern, None, None)
    request = Fuse((kernel,), "eager", None if where is None else _as_tuple(where))

    def matches(*args: Any, **kwargs: Any) -> list[Match]:
        program = trace(fn)(*args, **kwargs)
        search = Search(program, request)
        return [
            Match.of(part, search.reading) for group in search.apart() for part in group.plan.parts
        ]

    return matches


def _check_used(pattern: Any, kernel: Any, name: str | None) -> None:
    """Refuse a kernel or a name that nothing would come of."""
    if pattern is None and kernel is not None:
        raise KernelError(
            f"fuse(kernel={kernel!r}) without a pattern: give the pattern that it replaces, as in "
            "fuse(fn, pattern, kernel), or call register_kernel, so that fuse(fn) searches for it."
        )
    if pattern is None and name is not None:
        raise KernelError(
            f"fuse(name={name!r}) without a pattern: the library's kernels have names. A name is for a "
            f"pattern, as in fuse(fn, pattern, name={name!r})."
        )
    if not isinstance(pattern, Kernel):
        return
    if kernel is not None:
        raise KernelError(
            f"fuse(kernel={kernel!r}) and the Kernel {pattern.name!r}, which already has references "
            "and implementations: pass either a Kernel or kernel=, not both, as in fuse(fn, Kernel), "
            "or fuse(fn, pattern, kernel) with a pattern that is a function."
        )
    if name is not None and name != pattern.name:
        raise KernelError(
            f"fuse(name={name!r}) and the Kernel {pattern.name!r}, which already has a name; change it "
            f"with dataclasses.replace(kernel, name={name!r})."
        )


def _kernel(pattern: Any, kernel: Any, name: str | None) -> Kernel:
    """The Kernel that a pattern and a kernel, as given to `fuse`, describe."""
    if isinstance(pattern, Kernel):
        return pattern
    if isinstance(kernel, Kernel):
        # It is requested, so it is used even if it is not faster without weights.
        references = (pattern, *kernel.references)
        return replace(kernel, name=name or kernel.name, references=references, weights=())
    reference = pattern if isinstance(pattern, Pattern) else Pattern(pattern)
    name = name or reference.name
    if kernel is None:
        return Kernel(name, (reference,))
    return Kernel(name, (reference,), None, {"any": kernel}, None)


def _as_tuple(where: Where) -> tuple[Any, ...]:
    return (where,) if isinstance(where, str) or callable(where) else tuple(where)


@dataclass(frozen=True)
class Fuse(Rewrite):
    """The rewrite of ``fuse``.

    Attributes:
        kernels: the kernels that were requested; None for the library's.
        compiler, where, prefer: as for `fuse`.
        asked: whether the call was inlined into another trace. Then only nodes with its tag are fused.
    """

    kernels: tuple[Kernel, ...] | None
    compiler: str = "inductor"
    where: tuple[Any, ...] | None = None
    prefer: str = "time"
    asked: bool = False
    # Not by time after all; what a program asks for inside of another trace stays the same request.
    every: bool = field(default=False, compare=False)

    @property
    def by_time(self) -> bool:
        """Whether kernels must be faster, not only move fewer bytes; requested ones need not."""
        return self.kernels is None and self.prefer == "time" and not self.every

    @property
    def looked_for(self) -> tuple[Kernel, ...]:
        """The kernels to look for."""
        return tuple(KERNELS.values()) if self.kernels is None else self.kernels

    @property
    def of_all(self) -> Fuse:
        """The same rewrite for kernels that only move fewer bytes."""
        return replace(self, every=True)

    @property
    def passes(self) -> tuple[Pass, ...]:
        patterns = {f"fuse(where={pattern!r})": pattern for pattern in self.where or ()}
        return (pattern_pass(Stage.REPLACE, self, patterns, "be searched"),)

    def annotate(self, program: Program) -> Program:
        """Check that the requested scopes and pattern occur."""
        if self.where is not None:
            self._check_where(program)
        if self.kernels is not None:
            search = Search(program, self)
            if not search.apart():
                raise NoMatch(_no_match(self.kernels[0], program, search))
        return program

    def __call__(self, program: Program) -> Program:
        changed = program.copy()
        let_go_of_losses(changed)
        search = Search(changed, self)
        search.carry_out()
        each_its_own(program, changed)
        DERIVATIONS.save()
        found = Findings.of(program, self, search)
        return replace(
            changed,
            misses=(*program.misses, found.missed),
            written=(*program.written, found.written),
        )

    def inline(self, program: Program) -> Program:
        """Inside another trace: tag the nodes, which are fused when that trace is lowered."""
        inlined = replace(self, asked=True)

        def tagged(part: Program, _: object) -> Program:
            part = part.copy()
            for node in part.calls:
                FUSE.set(node, (*FUSE.get(node, ()), inlined))
            return part

        program = in_bodies(program, tagged)
        return replace(program, asks=tuple(dict.fromkeys((*program.asks, inlined))))

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node is in the call and the scopes that are to be fused."""
        if self.asked and self not in FUSE.get(node, ()):
            return False
        if self.where is None:
            return True
        return _inside(str(SCOPE.get(node) or ""), self.where)

    def _check_where(self, program: Program) -> None:
        assert self.where is not None
        scopes = scopes_in(program)
        if not any(_inside(scope, self.where) for scope in scopes):
            shown = ", ".join(map(repr, scopes[:12])) or "none: label a region with scope('block/0')"
            raise NoMatch(
                f"fuse({program.name}, where={self.where}) matches no scope of it; there are {shown}."
            )


def _inside(scope: str, where: tuple[Any, ...]) -> bool:
    """Whether ``where`` matches a scope or one that encloses it."""
    matches = chooser(where)
    parts = scope.split("/")
    return any(matches("/".join(parts[:i])) for i in range(1, len(parts) + 1))


def _no_match(kernel: Kernel, program: Program, search: Search) -> str:
    """The message of the error that a kernel's patterns do not occur in a program."""
    if search.refused:
        why = f"it occurs, but {search.refused[0][1].why}"
    elif search.stopped:
        why = search.stopped[0].why
    else:
        why = _nearest_miss(kernel, search)
    return (
        f"fuse({program.name}, {kernel.name}): the pattern has no match in it: {why}. "
        "find(fn, pattern)(*args) lists matches; print(trace(fn)(*args)) shows the operations."
    )


def _nearest_miss(kernel: Kernel, search: Search) -> str:
    """The nearest miss of a kernel's patterns, by a search that skips no candidate."""
    finder = Finder(search.reading, thorough=True)
    for pattern in kernel.patterns:
        finder.find(pattern)
    misses = [finder.misses[p] for p in kernel.patterns if p in finder.misses]
    nearest = max(misses, key=lambda miss: miss.depth, default=None)
    return "there is no near miss" if nearest is None else str(nearest)
