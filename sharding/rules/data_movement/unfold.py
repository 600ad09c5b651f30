"""unfold (sliding windows along a dim) and repeat."""

from __future__ import annotations

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell
from torchard.sharding.rules.registry.batched import emit_into_shape


def _ends(rank: int, dim: int) -> tuple[str, str, str]:
    names = letters(rank)
    windows = [*(f"w{i}" if i == dim else n for i, n in enumerate(names)), "step"]
    return spell(names), spell(windows), f" | linear 0 | whole d{dim} w{dim} step"


def _unfold(call: Call) -> str | None:
    if not call.ins[0]:
        return None
    rank = len(call.ins[0])
    whole, windows, clauses = _ends(rank, call.arg(1) % rank)
    return f"{whole} -> {windows}{clauses}"


def _unfold_backward(call: Call) -> str | None:
    if not call.outs[0]:
        return None
    rank = len(call.outs[0])
    whole, windows, clauses = _ends(rank, call.arg(2) % rank)
    return f"{windows} -> {whole}{clauses}"


register_rule(aten.unfold.default, aten.unfold_copy.default, text=_unfold)
register_rule(aten.unfold_backward.default, text=_unfold_backward, emit=emit_into_shape)


def _repeat(call: Call) -> str | None:
    """Each dim becomes (repetitions, dim), of which only the dim itself may be split."""
    if 0 in call.outs[0]:
        return None
    names, times = letters(len(call.ins[0])), call.arg(1)
    lead = len(times) - len(names)
    out = [f"r{i}={n}" for i, n in enumerate(times[:lead])]
    sizes = zip(names, call.ins[0], times[lead:], strict=True)
    out += [f"(r{lead + i}={n} {d}={size})" for i, (d, size, n) in enumerate(sizes)]
    return f"{spell(names)} -> {spell(out)} | linear 0"


register_rule(aten.repeat.default, text=_repeat)
