"""Policies: functions from a value to a decision, and combinations of such functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torchard.functional.core.errors import CheckpointError

__all__ = ["Decision", "Policy", "Shapes", "as_policy"]

Decision = Literal["recompute", "offload", "save"]
"""A policy's result: "recompute", "offload" (to host memory) or "save".

>>> from torchard import policies
>>> def keep_blocks(op, shapes, scope, name) -> policies.Decision:
...     return "save" if scope.startswith("block/") else "recompute"
>>> policies.as_policy(keep_blocks)("aten.mm", policies.Shapes(((2, 3), (3, 4)), (2, 4)), "head", None)
'recompute'
"""
# By device memory, ascending: `&` takes the minimum of two decisions, `|` the maximum.
_ORDER: tuple[Decision, ...] = ("recompute", "offload", "save")


class Shapes(NamedTuple):
    """The shapes that a policy receives.

    Attributes:
        operands: the shapes of the operation's tensor operands, in order.
        result: the shape of the value, which may be one of several results.

    >>> from torchard import policies
    >>> def save_large(op, shapes, scope, name):
    ...     return max(shapes.result) >= 1024
    >>> save_large("aten.mm", policies.Shapes(operands=((8, 64), (64, 4096)), result=(8, 4096)), "", None)
    True
    """

    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


Function = Callable[[str, Shapes, str, str | None], Any]


class Policy:
    """A policy ``(op, shapes, scope, name) -> Decision`` that combines with others by ``&`` and ``|``.

    ``a | b`` saves values that either saves, ``a & b`` those that both save. If one saves and the other
    offloads, ``|`` saves and ``&`` offloads.

    Args:
        decide: the function. It may return True for "save", and False or None for "recompute".
        text: the policy as it is printed.
        labels: labels that values of the function must have, else CheckpointError.
        choose: for a value with several labels, take the decision that keeps most (max) or least (min).

    >>> from torchard import policies
    >>> embeddings = policies.Policy(lambda op, shapes, scope, name: op == "aten.embedding", "embeddings")
    >>> embeddings | policies.save_dots
    (embeddings | save_dots)
    >>> isinstance(policies.save_dots, policies.Policy)
    True
    """

    # Why the policy cannot be combined with others, if it cannot.
    indivisible = ""

    def __init__(
        self,
        decide: Function,
        text: str,
        labels: Sequence[str] = (),
        choose: Callable[..., int] = max,
    ) -> None:
        self.decide, self.choose = decide, choose
        self.text = text
        self.labels = tuple(labels)

    def __call__(self, op: str, shapes: Shapes, scope: str, name: str | None) -> Decision:
        answer = self.decide(op, shapes, scope, name)
        if answer is None or isinstance(answer, bool):
            return "save" if answer else "recompute"
        if answer not in _ORDER:
            raise CheckpointError(
                f"the policy {self} returned {answer!r} for {op} {list(shapes.result)} in "
                f"{scope or 'no scope'}: it must return 'save', 'recompute' or 'offload' (or a bool)."
            )
        decision: Decision = answer
        return decision

    def over(self, op: str, shapes: Shapes, scope: str, names: Sequence[str | None]) -> Decision:
        """The decision on a value with several labels, by ``choose``."""
        ranks = (_ORDER.index(self(op, shapes, scope, name)) for name in names)
        return _ORDER[self.choose(ranks)]

    def __and__(self, other: Any) -> Policy:
        return _combined(self, other, min, "&")

    def __or__(self, other: Any) -> Policy:
        return _combined(self, other, max, "|")

    def __rand__(self, other: Any) -> Policy:
        return _combined(other, self, min, "&")

    def __ror__(self, other: Any) -> Policy:
        return _combined(other, self, max, "|")

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return Policy, (self.decide, self.text, self.labels, self.choose)


def as_policy(policy: Any) -> Policy:
    """Turn a plain function into a `Policy`; a Policy is returned as it is.

    Args:
        policy: a Policy, or a function of ``(op, shapes, scope, name)``.

    Returns:
        A Policy.

    Raises:
        CheckpointError: the policy is not callable.

    >>> from torchard import policies
    >>> policies.as_policy("save_dots")
    Traceback (most recent call last):
        ...
    torchard.CheckpointError: policy='save_dots' is not a policy: pass one of torchard.policies,
        such as policies.save_dots, or a function of (op, shapes, scope, name).
    """
    if isinstance(policy, Policy):
        return policy
    if not callable(policy) or isinstance(policy, type):
        raise CheckpointError(
            f"policy={policy!r} is not a policy: pass one of torchard.policies, such as "
            "policies.save_dots, or a function of (op, shapes, scope, name)."
        )
    return Policy(policy, getattr(policy, "__name__", repr(policy)))


def _combined(left: Any, right: Any, choose: Callable[..., int], sign: str) -> Policy:
    a, b = as_policy(left), as_policy(right)
    for policy in (a, b):
        if policy.indivisible:
            raise CheckpointError(f"{a} {sign} {b}: {policy.indivisible}")
    return _Combination(a, b, choose, sign)


class _Combination(Policy):
    """The minimum or maximum of the decisions of two policies."""

    def __init__(self, a: Policy, b: Policy, choose: Callable[..., int], sign: str) -> None:
        def decide(op: str, shapes: Shapes, scope: str, name: str | None) -> Decision:
            return self.over(op, shapes, scope, [name])

        super().__init__(decide, f"({a} {sign} {b})", (*a.labels, *b.labels), choose)
        self.both, self.sign = (a, b), sign

    def __reduce__(self) -> Any:
        return _combined, (*self.both, self.choose, self.sign)

    def over(self, op: str, shapes: Shapes, scope: str, names: Sequence[str | None]) -> Decision:
        ranks = [_ORDER.index(p.over(op, shapes, scope, names)) for p in self.both]
        return _ORDER[self.choose(ranks)]
