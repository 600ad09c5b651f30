"""The library's policies: which values a backward keeps, recomputes, or offloads to host memory.

A policy is a plain function ``(op, shapes, scope, name)`` of one value of the forward:

- ``op``: the operation, ``"aten.mm"``, ``"torchard.random_bits"``, ``"collective.all_reduce"``, or the
  name of a fused kernel;
- ``shapes``: the shapes of the operands and of the result, ``shapes.operands`` and ``shapes.result``;
- ``scope``: the scope that it runs in, ``"block/3"``, or ``""``;
- ``name``: the label that `torchard.name` gave the value, or None.

It returns "save", "recompute" or "offload", or True for "save" and False for "recompute". The policies of
this module, and combinations by ``&`` and ``|``, are `Policy` objects (`policy.py`).

After jax.checkpoint_policies, and Megatron-LM's selective recomputation (Korthikanti et al. 2022, §5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchard.functional.core.arguments import checked
from torchard.functional.costs.flops import DOTS
from torchard.functional.remat.policy import Decision, Policy, Shapes, as_policy

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

COLLECTIVE_PREFIX = "collective."


class _Named(Policy):
    """A policy that is a constant of this module, and is pickled by its name."""

    def __reduce__(self) -> Any:
        return self.text


# -- by operation -----------------------------------------------------------------------------------

_MATRIX_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten._scaled_mm", "aten.mv", "aten.addmv"})
_BATCHED = frozenset({"aten.bmm", "aten.baddbmm"})


def _no_batch(op: str, shapes: Shapes, scope: str, name: str | None) -> bool:
    return op in _MATRIX_PRODUCTS or (op in _BATCHED and shapes.result[0] == 1)


save_nothing = _Named(lambda op, shapes, scope, name: "recompute", "save_nothing")
"""Recompute every intermediate value in the backward: least memory, at the cost of another forward.

>>> import torch, torchard as ta
>>> x = torch.ones(8)
>>> f = ta.checkpoint(lambda x: x.sin().exp().sum(), policy=ta.policies.save_nothing)
>>> [r.what for r in ta.saved_residuals(f, x)]
['args[0]']
"""
save_everything = _Named(lambda op, shapes, scope, name: "save", "save_everything")
"""Save every intermediate value that the backward reads, as without a checkpoint.

>>> import torch, torchard as ta
>>> x = torch.ones(8)
>>> f = ta.checkpoint(lambda x: x.sin().exp().sum(), policy=ta.policies.save_everything)
>>> [r.what for r in ta.saved_residuals(f, x)]
['args[0]', 'aten.exp']
"""
save_dots = _Named(lambda op, shapes, scope, name: op in DOTS, "save_dots")
"""Save the results of matrix products, convolutions and attention; recompute the rest.

Source: ``jax.checkpoint_policies.dots_saveable``.

>>> import torch, torchard as ta
>>> w, x = torch.ones(4, 4), torch.ones(2, 4)
>>> f = ta.checkpoint(lambda w, x: (x @ w).sin().exp().sum(), policy=ta.policies.save_dots)
>>> [r.what for r in ta.saved_residuals(f, w, x)]
['args[0]', 'args[1]', 'aten.mm']
"""
save_dots_with_no_batch_dims = _Named(_no_batch, "save_dots_with_no_batch_dims")
"""Save the results of matrix products without batch dims; recompute the rest.

In a transformer these are the products with weights, and not those of attention.

Source: ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable``.

>>> import torch, torchard as ta
>>> policy = ta.policies.save_dots_with_no_batch_dims
>>> w, x = torch.ones(4, 4), torch.ones(2, 3, 4)
>>> def scores(w, x):
...     y = x @ w                                    # saved
...     return (y @ y.mT).sin().sum()                # a batched product: recomputed
>>> [r.what for r in ta.saved_residuals(ta.checkpoint(scores, policy=policy), w, x)]
['args[0]', 'args[1]', 'aten.mm']
"""
save_collectives = _Named(
    lambda op, shapes, scope, name: op.startswith(COLLECTIVE_PREFIX), "save_collectives"
)
"""Save the results of collectives, so that the backward does not repeat them; recompute the rest.

>>> import torch, torchard as ta
>>> mesh = ta.Mesh({"tp": 2}, virtual=True)
>>> x = ta.place(torch.ones(2, 4), mesh, ta.P(None, "tp"))
>>> f = ta.checkpoint(lambda x: x.sum(1).sin().exp().sum(), policy=ta.policies.save_collectives)
>>> [r.what for r in ta.saved_residuals(ta.shard(f, mesh), x)]
['all_reduce']
"""


# -- by label --------------------------------------------------------------------------------------


def _listed(verb: str, names: Sequence[str]) -> str:
    return f"{verb}({', '.join(map(repr, names))})"


@dataclass(frozen=True)
class _OfNames:
    """A function that decides by label: one decision for values with these labels, one for the others."""

    names: Sequence[str]
    decision: Decision
    others: Decision

    def __call__(self, op: str, shapes: Shapes, scope: str, name: str | None) -> Decision:
        return self.decision if name in self.names else self.others


@checked
def save_names(*names: str) -> Policy:
    """Save the values with these labels (see `torchard.name`); recompute the rest.

    Args:
        names: labels.

    Returns:
        A Policy. A checkpoint with it raises CheckpointError if no value of the function has a label.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     return ta.name(x.sin(), "angle").exp().sum()
    >>> g = ta.checkpoint(f, policy=ta.policies.save_names("angle"))
    >>> [r.what for r in ta.saved_residuals(g, torch.ones(8))]
    ['args[0]', 'aten.sin']
    """
    text = _listed("save_names", names)
    return Policy(_OfNames(names, "save", "recompute"), text, names)


@checked
def save_all_but_names(*names: str) -> Policy:
    """Recompute the values with these labels (see `torchard.name`); save the rest.

    Args:
        names: labels.

    Returns:
        A Policy. A checkpoint with it raises CheckpointError if no value of the function has a label.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     return ta.name(x.sin(), "angle").exp().sum()
    >>> g = ta.checkpoint(f, policy=ta.policies.save_all_but_names("angle"))
    >>> [r.what for r in ta.saved_residuals(g, torch.ones(8))]
    ['args[0]', 'aten.exp']
    """
    text = _listed("save_all_but_names", names)
    return Policy(_OfNames(names, "recompute", "save"), text, names, choose=min)


@checked
def offload_names(*names: str) -> Policy:
    """Keep the values with these labels in host memory until the backward; recompute the rest.

    On an accelerator they are copied to pinned memory and back asynchronously. On a CPU the copies are
    ordinary operations.

    Args:
        names: labels; see `torchard.name`.

    Returns:
        A Policy. A checkpoint with it raises CheckpointError if no value of the function has a label.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     return ta.name(x.sin(), "angle").exp().sum()
    >>> g = ta.checkpoint(f, policy=ta.policies.offload_names("angle"))
    >>> [r.what for r in ta.saved_residuals(g, torch.ones(8))]
    ['args[0]', 'torchard.offload']
    """
    text = _listed("offload_names", names)
    return Policy(_OfNames(names, "offload", "recompute"), text, names)


# -- by peak memory ----------------------------------------------------------------------------------


class Budget(Policy):
    """A bound on peak memory, made by `budget`. It cannot be combined with other policies.

    Args:
        fraction: see `budget`.
        bytes: see `budget`.

    >>> from torchard import policies
    >>> isinstance(policies.budget(fraction=0.5), policies.Budget)
    True
    >>> policies.Budget(None, 10_000) | policies.save_dots
    Traceback (most recent call last):
        ...
    torchard.CheckpointError: budget(bytes=10,000) | save_dots: a budget decides on every value,
        so it cannot be combined with another policy. Checkpoint a part of the function with
        `where` instead.
    """

    indivisible = (
        "a budget decides on every value, so it cannot be combined with another policy. Checkpoint a "
        "part of the function with `where` instead."
    )

    def __init__(self, fraction: float | None, bytes: int | None) -> None:
        bound = f"fraction={fraction}" if bytes is None else f"bytes={bytes:,}"
        super().__init__(lambda *value: "recompute", f"budget({bound})")
        self.fraction, self.bytes = fraction, bytes

    def __reduce__(self) -> Any:
        return Budget, (self.fraction, self.bytes)


@checked
def budget(*, fraction: float | None = None, bytes: int | None = None) -> Budget:
    """Recompute as few FLOPs as a bound on peak memory allows. Needs scipy (the ``budget`` extra).

    The peak is that of the forward and backward together: the bytes of all live values, arguments and
    results included, each storage counted once; over a mesh, on the rank that holds most.

    Args:
        fraction: the bound, between the lowest peak that can be reached (0) and the peak of saving
            everything (1).
        bytes: the bound in bytes, on one device.

    Returns:
        A Policy that chooses for all values of a program at once.

    Raises:
        ValueError: not exactly one of the two is given, or the fraction is outside [0, 1].
        CheckpointError (when called): the bound is below the lowest peak, which the message states.
        ModuleNotFoundError (when called): scipy is not installed.

    >>> import torch, torchard as ta
    >>> def chain(x):
    ...     for _ in range(8):
    ...         x = x.sin()
    ...     return x.sum()
    >>> def peak(fraction):
    ...     f = ta.checkpoint(chain, policy=ta.policies.budget(fraction=fraction))
    ...     return f.lower_joint(torch.ones(1000)).peak
    >>> peak(1.0), peak(0.5), peak(0.0)                                # bytes
    (36008, 28008, 24008)
    """
    if (fraction is None) == (bytes is None):
        raise ValueError("budget(...) takes either fraction or bytes, as in budget(fraction=0.5).")
    if fraction is not None and not 0 <= fraction <= 1:
        raise ValueError(
            f"budget(fraction={fraction}): the fraction must be in [0, 1]; 0 is the least peak that can "
            "be reached, 1 that of saving everything."
        )
    return Budget(fraction, bytes)
