"""Operations on the last dims of their operands: whatever is in front of those may be split.

Tables of how many last dims belong to the operation, for every operand and result.
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
    """The rule for so many whole last dims; results not asked for are empty and have none in front."""
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
    """Dims in front, counted from the right, that some result lacks: it is no sum over them."""
    sizes = list(itertools.zip_longest(*leads, fillvalue=1))
    return [i for i, found in enumerate(sizes) if len(set(found)) > 1]


def emit_into_shape(call: Call, local: Local) -> Any:
    """A backward whose second argument is the whole shape of its result: here the local one."""
    grad, _, *rest = local.args
    return local.call(call.target, grad, local.shape(), *rest)


def emit_contiguous(call: Call, local: Local) -> Any:
    """For kernels that read memory as if operands were contiguous; a shard need not be."""
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
    """Register operations with these numbers of last dims."""

    def text(call: Call) -> str:
        return core_text(call, ins, outs, clauses)

    register_rule(*targets, text=text, emit=emit)
