"""fuse: what is written as several operations and run as one, said beside the function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import KernelError, NoMatch
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Program, Rewrite
from torchard.functional.programs.tags import SCOPE
from torchard.functional.remat.segments import Where, chooser, scopes_in
from torchard.functional.trace import trace
from torchard.kernels import library  # noqa: F401  (its kernels)
from torchard.kernels.execution.autotune import COMPILERS
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Finder, Miss
from torchard.kernels.patterns.pattern import Pattern
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
    where: Where | None = None,
    name: str | None = None,
) -> Transformed:
    """Run every occurrence of a pattern in a function as one kernel, however it is spelled there.

    Without a pattern, all kernels of the library are looked for, and used where that moves fewer bytes.
    With one, its occurrences run as ``kernel``, or are compiled. Gradients are fused as well.

    Args:
        fn: a pure function of pytrees.
        pattern: a function of tensors (see `Pattern`), a Pattern, or a Kernel.
        kernel: a function that computes the same, or a Kernel.
        compiler: for kernels without an implementation for the device: ``"inductor"`` (on a CPU, only
            where it is faster than eager operations; see ``.lower(...).kernels``) or ``"eager"``.
        where: look only in these scopes: a pattern (``"block/*"``), several, or a function of the path.
        name: of the kernel, in reports and for policies; by default that of the pattern.

    Returns:
        A function that computes what ``fn`` does, with ``.lower`` and ``.lower_joint``.

    Raises:
        KernelError: an unknown compiler, or a kernel without a pattern. When called: the kernel returns
            other shapes or dtypes than the pattern, or has no vjp and gradients go through it.
        PatternError: the pattern cannot be traced.
        NoMatch (when called): the pattern, or ``where``, does not occur in ``fn``; lists near misses.

    Source: Slapo, Chen et al., arXiv:2302.08005, for patterns that are given beside the model.

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
    if pattern is None and kernel is not None:
        raise KernelError(
            f"fuse(kernel={kernel!r}) without a pattern: say what it replaces, as in fuse(fn, pattern, "
            "kernel), or register_kernel it to have fuse(fn) look for it."
        )
    kernels = None if pattern is None else (_kernel(pattern, kernel, name),)
    places = None if where is None else _places(where)
    return Transformed(fn, (Fuse(kernels, compiler, places),))


@checked
def find(
    fn: Callable[..., Any],
    pattern: Pattern | Kernel | Callable[..., Any],
    *,
    where: Where | None = None
) -> Callable[..., list[Match]]:
    """List the occurrences of a pattern, and of its gradient, in a function. Nothing is rewritten.

    Args:
        fn: a pure function of pytrees.
        pattern: as for `fuse`.
        where: as for `fuse`.

    Returns:
        A function of ``fn``'s arguments that returns a list of matches. Where there are none, the error
        of ``fuse(fn, pattern)`` lists near misses.

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
    fuse_ = Fuse((kernel,), "eager", None if where is None else _places(where))

    def found(*args: Any, **kwargs: Any) -> list[Match]:
        program = trace(fn)(*args, **kwargs)
        search = Search(program, fuse_)
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
class Fuse(Rewrite):
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
            search = Search(program, self)
            if not search.apart():
                raise NoMatch(_nothing(self.kernels[0], program, search))
        return program

    def __call__(self, program: Program) -> Program:
        changed = program.copy()
        let_go_of_losses(changed)
        search = Search(changed, self)
        search.carry_out()
        each_its_own(program, changed)
        return replace(changed, misses=(*program.misses, search.missed(program)))

    def inline(self, program: Program) -> Program:
        """Inside another trace: mark what it is about, to be done when that one is lowered."""
        program = program.copy()
        mine = Fuse(self.kernels, self.compiler, self.where, True)
        for node in program.calls:
            FUSE.set(node, (*FUSE.get(node, ()), mine))
        program.asks = tuple(dict.fromkeys((*program.asks, mine)))
        return program

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node is in what this is said of."""
        if self.asked and self not in FUSE.get(node, ()):
            return False
        if self.where is None:
            return True
        return _inside(str(SCOPE.get(node) or ""), self.where)

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


def _nothing(kernel: Kernel, program: Program, search: Search) -> str:
    thorough = Finder(search.reading, thorough=True)
    for pattern in kernel.patterns:
        thorough.find(pattern)
    misses = [thorough.misses[p] for p in kernel.patterns if p in thorough.misses]
    nearest = max(misses, key=lambda miss: miss.depth, default=None)
    why = f"nearest was {nearest}" if isinstance(nearest, Miss) else "nothing came near"
    if search.refused:
        why = f"it is there, but {search.refused[0][1].why}"
    elif search.stopped:
        why = search.stopped[0].why
    return (
        f"fuse({program.name}, {kernel.name}): the pattern is nowhere in it; {why}. "
        "find(fn, pattern)(*args) lists matches; print(trace(fn)(*args)) shows the operations."
    )
