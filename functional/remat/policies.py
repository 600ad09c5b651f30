"""Policies: which values the backward keeps, which it makes again, which wait in host memory.

A policy is a plain function ``(op, shapes, scope, name)`` of one value of the forward:

- ``op``, what makes it: ``"aten.mm"``, ``"torchard.random_bits"``, ``"collective.all_reduce"``, or the
  name of a fused kernel;
- ``shapes``, of the operands and of the result: ``shapes.operands``, ``shapes.result``;
- ``scope``, ``"block/3"``, or ``""``;
- ``name``, the label that `torchard.name` gave the value, or None.

It returns "save", "recompute" or "offload", or True for "save" and False for "recompute". Those of this
module, and what ``&`` and ``|`` make of any two, are `Policy` objects.

After jax.checkpoint_policies, and Megatron-LM's selective recomputation (Korthikanti et al. 2022, §5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import CheckpointError
from torchard.functional.programs.flops import DOTS

__all__ = [
    "Budget",
    "Decision",
    "Policy",
    "Shapes",
    "as_policy",
    "budget",
    "offload_names",
    "save_all_but_names",
    "save_collectives",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_everything",
    "save_names",
    "save_nothing",
]

Decision = Literal["recompute", "offload", "save"]
# From the least that is kept on the device to the most: `&` takes the lesser, `|` the greater.
_ORDER: tuple[Decision, ...] = ("recompute", "offload", "save")

COLLECTIVE = "collective."


class Shapes(NamedTuple):
    """Of an operation: its tensors in order, and what it makes (of several results, this one)."""

    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


Function = Callable[[str, Shapes, str, str | None], Any]


class Policy:
    """A function ``(op, shapes, scope, name)`` that can be combined by ``&`` and ``|``.

    ``a | b`` keeps what either keeps, ``a & b`` what both do; of saving and offloading, ``|`` saves.

    Args:
        decide: the function.
        text: what it prints as.
        labels: names that must be there.
        choose: which decision counts if a value has several labels, max or min.
    """

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
        found = self.decide(op, shapes, scope, name)
        if found is None or isinstance(found, bool):
            return "save" if found else "recompute"
        if found not in _ORDER:
            raise CheckpointError(
                f"the policy {self} returned {found!r} for {op} {list(shapes.result)} in "
                f"{scope or 'no scope'}: it must be 'save', 'recompute' or 'offload' (or a bool)."
            )
        decision: Decision = found
        return decision

    def over(self, op: str, shapes: Shapes, scope: str, names: Sequence[str | None]) -> Decision:
        """The decision on a value with several labels: the most that is kept by any of them."""
        found = (_ORDER.index(self(op, shapes, scope, name)) for name in names)
        return _ORDER[self.choose(found)]

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
        if globals().get(self.text) is self:
            return self.text  # one of this module: itself again
        return Policy, (self.decide, self.text, self.labels, self.choose)


def as_policy(policy: Any) -> Policy:
    """A policy, or a plain function taken for one.

    Raises:
        CheckpointError: it cannot be called.
    """
    if isinstance(policy, Policy):
        return policy
    if not callable(policy) or isinstance(policy, type):
        raise CheckpointError(
            f"policy={policy!r} is no policy: take one of torchard.policies, such as "
            "policies.save_dots, or a function of (op, shapes, scope, name)."
        )
    return Policy(policy, getattr(policy, "__name__", repr(policy)))


def _combined(one: Any, other: Any, choose: Callable[..., int], sign: str) -> Policy:
    a, b = as_policy(one), as_policy(other)
    for policy in (a, b):
        if isinstance(policy, Budget):
            raise CheckpointError(
                f"{a} {sign} {b}: a budget chooses all that is saved; there is nothing to add to it or "
                "take from it. Checkpoint a part of the function with `where` instead."
            )

    return _Both(a, b, choose, sign)


class _Both(Policy):
    """What two policies say, the lesser of it or the greater."""

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


# -- what makes it ----------------------------------------------------------------------------------

_MATRIX_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten._scaled_mm", "aten.mv", "aten.addmv"})
_BATCHED = frozenset({"aten.bmm", "aten.baddbmm"})


def _no_batch(op: str, shapes: Shapes, scope: str, name: str | None) -> bool:
    return op in _MATRIX_PRODUCTS or (op in _BATCHED and shapes.result[0] == 1)


save_nothing = Policy(lambda op, shapes, scope, name: "recompute", "save_nothing")
save_everything = Policy(lambda op, shapes, scope, name: "save", "save_everything")
save_dots = Policy(lambda op, shapes, scope, name: op in DOTS, "save_dots")
save_dots_with_no_batch_dims = Policy(_no_batch, "save_dots_with_no_batch_dims")
save_collectives = Policy(
    lambda op, shapes, scope, name: op.startswith(COLLECTIVE), "save_collectives"
)


# -- what it is called ------------------------------------------------------------------------------


def _listed(verb: str, names: Sequence[str]) -> str:
    return f"{verb}({', '.join(map(repr, names))})"


@dataclass(frozen=True)
class _OfNames:
    """A decision for values with these labels, and one for all others."""

    names: Sequence[str]
    decision: Decision
    others: Decision

    def __call__(self, op: str, shapes: Shapes, scope: str, name: str | None) -> Decision:
        return self.decision if name in self.names else self.others


@checked
def save_names(*names: str) -> Policy:
    """Save the values with these labels, and nothing else."""
    text = _listed("save_names", names)
    return Policy(_OfNames(names, "save", "recompute"), text, names)


@checked
def save_all_but_names(*names: str) -> Policy:
    """Make the values with these labels again, and save whatever else the backward needs."""
    text = _listed("save_all_but_names", names)
    return Policy(_OfNames(names, "recompute", "save"), text, names, choose=min)


@checked
def offload_names(*names: str) -> Policy:
    """Keep the values with these labels in host memory; make everything else again.

    On an accelerator they are copied to pinned memory and back beside the computation. Where the
    program runs on the host itself the copies are operations like any other.
    """
    text = _listed("offload_names", names)
    return Policy(_OfNames(names, "offload", "recompute"), text, names)


# -- how much of it ---------------------------------------------------------------------------------


class Budget(Policy):
    """A bound on peak memory; what is saved is chosen for all of the program at once (budget.py)."""

    def __init__(self, fraction: float | None, bytes: int | None) -> None:
        given = f"fraction={fraction}" if bytes is None else f"bytes={bytes:,}"
        super().__init__(lambda *value: "recompute", f"budget({given})")
        self.fraction, self.bytes = fraction, bytes

    def __reduce__(self) -> Any:
        return Budget, (self.fraction, self.bytes)


@checked
def budget(*, fraction: float | None = None, bytes: int | None = None) -> Budget:
    """As few recomputed FLOPs as peak memory allows.

    The peak is that of forward and backward: bytes of all live values, the arguments and results
    among them, each storage once; over a mesh, those of the rank that holds most.

    Args:
        fraction: between 0, the least peak that can be had, and 1, that of saving everything.
        bytes: of one device.

    Raises:
        ValueError: not exactly one of the two, or a fraction outside [0, 1].
        CheckpointError (when called): less than the least achievable peak, which it names.
        ModuleNotFoundError (when called): scipy is not installed.
    """
    if (fraction is None) == (bytes is None):
        raise ValueError("budget(...) takes a fraction or bytes, and not both: budget(fraction=0.5).")
    if fraction is not None and not 0 <= fraction <= 1:
        raise ValueError(
            f"budget(fraction={fraction}): 0 is the least peak that can be had, 1 that of saving "
            "everything."
        )
    return Budget(fraction, bytes)
