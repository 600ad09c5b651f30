"""Registration of decompositions by users, which are checked against their operation when first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.arguments import checked
from torchard.functional.effects.unused_results import declare_pure
from torchard.functional.programs.graphs import with_operands
from torchard.functional.programs.tags import VAL
from torchard.sharding.decompositions.functional_forms import DECOMPOSITIONS, Checked
from torchard.sharding.layouts.factors import RuleError
from torchard.sharding.rule_check import check_overloads, close, random_like, tensors_of

__all__ = ["register_decomposition"]

# The most elements of a call whose decomposition is compared with it.
_MOST = 2**20
# By how many roundings of the largest element the two may differ.
_ROUNDINGS = 1000


@checked
def register_decomposition(*targets: Any, fn: Callable[..., Any]) -> None:
    """Register a function of operations that can be split, which computes the same as an operation.

    A plan replaces the operation by this function if the operation would have to gather a split dim: a
    dim that its rule calls ``whole``, or any dim if it has no rule. So only the communication of the
    function's operations crosses the network: for a norm, statistics and not values.

    The function is compared with the operation when it is first used, on random tensors of the call's
    shapes, unless the operation takes indices or checks values, so that random tensors do not suit it.
    It takes effect in calls that are traced after it; a function's calls like an earlier one are not
    traced again.

    Args:
        targets: ``torch.ops`` overloads.
        fn: takes the operation's arguments, and returns the same number of tensors, with the same shapes
            and dtypes; it is traced. If it returns NotImplemented, the call is not decomposed and
            gathers.

    Raises:
        TypeError: a target is not an overload, such as ``torch.ops.mine.norm.default``.
        RuleError: (when it is first used) the function does not compute the same as the operation.

    >>> import torch, torchard as ta
    >>> @torch.library.custom_op("docs::centered", mutates_args=())
    ... def centered(x: torch.Tensor) -> torch.Tensor:
    ...     return x - x.mean(-1, keepdim=True)
    >>> @centered.register_fake
    ... def _(x):
    ...     return torch.empty_like(x)
    >>> ta.register_decomposition(
    ...     torch.ops.docs.centered.default, fn=lambda x: x - x.mean(-1, keepdim=True))
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> x = ta.place(torch.arange(8.0).view(2, 4), mesh, ta.P(None, "tp"))
    >>> run = ta.shard(lambda x: centered(x), mesh)
    >>> [(c.kind, c.shape) for c in run.lower(x).collectives]    # sums of rows, and no values
    [('all_reduce', (2, 1))]
    """
    check_overloads("register_decomposition", targets)
    check = _Check(fn)
    for target in targets:
        declare_pure(target)
        DECOMPOSITIONS[target] = Checked(fn, check)


class _Check:
    """Compares a decomposition with its operation, once for calls of a kind."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.known: set[Any] = set()

    def __call__(self, node: fx.Node) -> None:
        operands = [VAL.of(n) for n in node.all_input_nodes]
        kind = node.target, tuple((x.shape, x.dtype) for x in operands), str((node.args, node.kwargs))
        if kind in self.known or sum(x.numel() for x in operands) > _MOST:
            return
        with internals.clean_thread_state(gradients=False):
            self._compare(node, operands)
        self.known.add(kind)

    def _compare(self, node: fx.Node, operands: list[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        args, kwargs = with_operands(node, [random_like(x, x.shape, generator) for x in operands])
        target: Any = node.target
        try:
            want = tensors_of(target(*args, **kwargs))
        except Exception:  # it cannot be called on random tensors
            return
        found = self.fn(*args, **kwargs)
        if found is NotImplemented:
            return
        have = tensors_of(found)
        pairs = zip(have, want, strict=False)
        if len(have) != len(want) or not all(close(*pair, _ROUNDINGS, 1e-30) for pair in pairs):
            raise RuleError(
                f"the decomposition of {node.target} is wrong: on random tensors of shapes "
                f"{[list(x.shape) for x in operands]} {_difference(have, want)}. It must compute the "
                "same as the operation."
            )


def _difference(have: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """What differs: the dtypes and shapes; or, if these agree, the values."""
    if _kinds(have) != _kinds(want):
        return f"it returns {_kinds(have)} instead of {_kinds(want)}"
    gaps = [
        float((x.to(torch.complex128) - y.to(torch.complex128)).abs().max())
        for x, y in zip(have, want, strict=True)
        if x.numel()
    ]
    return f"its values differ by up to {max(gaps):.2e}"


def _kinds(values: list[torch.Tensor]) -> str:
    return ", ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in values)
