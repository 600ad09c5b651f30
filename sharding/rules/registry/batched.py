"""Rules of batched operations: batch dims may be split, core dims may not.

As in NumPy's generalized ufuncs, core dims are the trailing dims on which the operation itself works. An
operation is registered with their number, for each operand and each result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule

Cores = Sequence[int]


def core_text(call: Call, ins: Cores, outs: Cores, clauses: str = "") -> str:
    """The rule for these numbers of core dims.

    A result that was not requested is an empty tensor [0], without batch dims.
    """
    lead = max((len(s) - k for s, k in zip(call.ins, ins, strict=False)), default=0)
    whole: list[str] = []

    def operand(prefix: str, shape: tuple[int, ...], core: int) -> str:
        missing = shape == (0,) and lead + core != 1
        names = [f"{prefix}{i}" for i in range(len(shape) if missing else core)]
        whole.extend(names)
        return " ".join(names if missing else ["...", *names])

    left = [operand(f"x{k}_", s, n) for k, (s, n) in enumerate(zip(call.ins, ins, strict=False))]
    right = [operand(f"y{k}_", s, n) for k, (s, n) in enumerate(zip(call.outs, outs, strict=False))]
    leads = [s[: len(s) - k][::-1] for s, k in zip(call.outs, outs, strict=False) if s != (0,)]
    whole += [f".{i}" for i in _not_on_all(leads)]
    clause = f" | whole {' '.join(whole)}" if whole else ""
    return f"{', '.join(left)} -> {', '.join(right)}{clause}{clauses}"


def _not_on_all(leads: Sequence[tuple[int, ...]]) -> list[int]:
    """Batch dims, counted from the right, that some result lacks without being a sum over them."""
    sizes = itertools.zip_longest(*leads, fillvalue=1)
    return [i for i, sizes_of_dim in enumerate(sizes) if len(set(sizes_of_dim)) > 1]


def emit_into_shape(call: Call, local: Local) -> Any:
    """Emit a backward whose second argument is the shape of its result, with the local shape."""
    grad, _, *rest = local.args
    return local.call(call.target, grad, local.shape(), *rest)


def emit_contiguous(call: Call, local: Local) -> Any:
    """Emit an operation whose kernel assumes contiguous operands, which shards need not be."""
    args = [
        local.call(aten.contiguous.default, a) if isinstance(a, fx.Node) else a for a in local.args
    ]
    return local.call(call.target, *args, **local.kwargs)


def batched(
    *targets: Any,
    ins: Cores,
    outs: Cores,
    clauses: str = "",
    emit: Callable[[Call, Local], Any] | None = None,
) -> None:
    """Register operations with these numbers of core dims."""

    def text(call: Call) -> str:
        return core_text(call, ins, outs, clauses)

    register_rule(*targets, text=text, emit=emit)
