"""checkpoint: a policy for which values of the forward the backward keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import fx

from torchard.functional.core.arguments import CheckedInside, checked
from torchard.functional.core.errors import CheckpointError
from torchard.functional.engine.transformed import Transformed
from torchard.functional.loops.call import in_bodies
from torchard.functional.programs.program import Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import NAME
from torchard.functional.programs.unrolled import pattern_pass
from torchard.functional.remat.policies import save_nothing
from torchard.functional.remat.policy import Policy, as_policy
from torchard.functional.remat.recompute import RECOMPUTE
from torchard.functional.remat.segments import (
    ScopePattern,
    Where,
    chooser,
    mark,
    scopes_in,
    segments_of,
)

__all__ = ["Checkpoint", "checkpoint"]


@checked
def checkpoint(
    fn: Callable[..., Any],
    *,
    policy: Any = save_nothing,
    where: Annotated[Where | None, CheckedInside] = None,
) -> Transformed:
    """Save the values that a policy selects for the backward, and recompute the rest there.

    The policy applies wherever the gradient is taken: of this function, of a function that calls it, or
    inside ``fn`` itself, as in a training step. By default all of ``fn`` is one segment: its arguments
    are saved, and the policy decides about every value computed from them. A result that operations
    outside the segment need for their own gradients is saved, whatever the policy. A value is recomputed
    right before its first use in the backward, by the same operations on the same operands; draws from a
    key give the same numbers again. Checkpoints nest: the outer one recomputes values in its backward,
    and the policy of the inner one decides which of these are held until they are used.

    Args:
        fn: a pure function of pytrees.
        policy: one of `torchard.policies`, or a function of ``(op, shapes, scope, name)``.
        where: a pattern (``"block/*"``), a predicate on the path of a scope, or a list of these. Each
            time a matching scope is entered, the code that runs in it is one segment. By default, all of
            ``fn`` is one segment. A pattern that may select only some layers of a loop unrolls the loop,
            with an `UnrolledLoopWarning`.

    Returns:
        A function that computes the same as ``fn``, with ``.lower`` and ``.lower_joint``.

    Raises (when called):
        CheckpointError: ``where`` matches no scope of ``fn``, no value of it has a label that the policy
            names, or a budget is too small.

    Source: Chen et al., arXiv:1604.06174; ``jax.checkpoint`` for policies.

    >>> import torch, torchard as ta
    >>> def mlp(params, x):
    ...     for w in params:
    ...         x = torch.tanh(x @ w)
    ...     return x.sum()
    >>> params, x = [torch.ones(4, 4) for _ in range(3)], torch.ones(2, 4)
    >>> checked = ta.checkpoint(mlp, policy=ta.policies.save_dots)
    >>> [len(ta.saved_residuals(f, params, x)) for f in (ta.checkpoint(mlp), checked)]
    [4, 7]
    >>> plain, again = (torch.func.grad(f)(params, x) for f in (mlp, checked))
    >>> [torch.equal(a, b) for a, b in zip(plain, again)]
    [True, True, True]
    """
    return Transformed(fn, (Checkpoint(as_policy(policy), _patterns(where)),))


def _patterns(where: Any) -> tuple[ScopePattern, ...] | None:
    """The patterns and predicates of ``where`` as a tuple; None means all of the function."""
    if where is None:
        return None
    patterns = (where,) if isinstance(where, str) or callable(where) else where
    if not isinstance(patterns, (tuple, list)) or not all(
        isinstance(pattern, str) or callable(pattern) for pattern in patterns
    ):
        raise CheckpointError(
            f"checkpoint(..., where={where!r}): a pattern over scopes is a string such as 'block/*', a "
            "function of a scope's path, or a list of these."
        )
    if not patterns:
        raise CheckpointError("checkpoint(..., where=()) names no scope; omit it for all of fn.")
    return tuple(patterns)


@dataclass(frozen=True)
class Checkpoint(Rewrite):
    """The rewrite of `checkpoint`: marks segments. Their policies are applied last, by `Recompute`."""

    policy: Policy
    where: tuple[ScopePattern, ...] | None = None

    @property
    def asks(self) -> tuple[Rewrite, ...]:
        return (RECOMPUTE,)

    @property
    def passes(self) -> tuple[Pass, ...]:
        patterns = {f"checkpoint(where={pattern!r})": pattern for pattern in self.where or ()}
        # Before kernels are fused: none may span the boundary of a segment.
        return (pattern_pass(Stage.MARK, self, patterns, "be segments"),)

    def annotate(self, program: Program) -> Program:
        """Check that the scopes and labels that the user named exist."""
        self._check_where(program)
        self._check_labels(program)
        return program

    def __call__(self, program: Program) -> Program:
        return mark(program, self.policy, self.where)

    def inline(self, program: Program) -> Program:
        """The marked program, whose policies are applied when the outer trace is lowered."""
        if self.where is None:  # bodies of loops are in the segments of their loop
            marked = self(program)
        else:
            marked = in_bodies(
                program, lambda part, outer: mark(part, self.policy, self.where, outer)
            )
        return replace(marked, asks=(*program.asks, RECOMPUTE))

    def wants(self, node: fx.Node) -> bool:
        """Whether the policy names the label of a value."""
        return NAME.get(node) in self.policy.labels

    def _check_where(self, program: Program) -> None:
        if self.where is None:
            return
        scopes = scopes_in(program)
        for pattern in self.where:
            if not any(map(chooser([pattern]), scopes)):
                raise CheckpointError(
                    f"checkpoint({program.name}, where={_text(pattern)}) matches no scope of it; "
                    + (
                        f"there are {_some(scopes)}."
                        if scopes
                        else "it has no scopes: open one with `with scope('block/0'):`."
                    )
                )

    def _check_labels(self, program: Program) -> None:
        if not self.policy.labels:
            return
        marked = mark(program, self.policy, self.where)
        inside, everywhere = dict[str, None](), dict[str, None]()
        for node in (*marked.placeholders, *marked.calls):
            if (label := NAME.get(node)) is not None:
                everywhere[label] = None
                if segments_of(node) or (self.where is None and node.op == "placeholder"):
                    inside[label] = None
        for label in self.policy.labels:
            if label in inside:
                continue
            problem = "is on no value"
            if label in everywhere:
                problem = f"is on no value inside of where={_text(self.where)}"
            remedy = f"the labels are {_some(list(inside))}" if inside else "label one with name(x, ...)"
            raise CheckpointError(
                f"checkpoint({program.name}, policy={self.policy}): the label {label!r} {problem}; "
                f"{remedy}."
            )


def _text(where: Any) -> str:
    """A pattern, or the name of a predicate, as a message shows it."""
    if isinstance(where, tuple) and len(where) == 1:
        (where,) = where
    return getattr(where, "__name__", repr(where))


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:12]))
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown
