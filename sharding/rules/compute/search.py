"""Search in sorted rows and in sets, which are whole; order statistics along a whole dim; glu."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell
from torchard.sharding.rules.registry.batched import emit_contiguous


def _buckets(call: Call) -> str:
    return "..., n -> ... | whole n"


def _sorted_rows(call: Call) -> str | None:
    """searchsorted: one sorted row for all values, or one for each row of values."""
    rows, *values = call.ins
    if len(call.ins) != 2 or not values[0]:
        return None
    if len(rows) == 1:
        return "n, ... -> ... | whole n"
    return "... n, ... m -> ... m | whole n"


def _member(call: Call) -> str | None:
    if len(call.ins) != 2:
        return None
    tests = [f"t{i}" for i in range(len(call.ins[1]))]
    return f"..., {spell(tests)} -> ..." + (f" | whole {spell(tests)}" if tests else "")


# torch warns of values that are not contiguous, which shards need not be.
register_rule(aten.bucketize.Tensor, text=_buckets, emit=emit_contiguous)
register_rule(aten.searchsorted.Tensor, text=_sorted_rows, emit=emit_contiguous)
register_rule(aten.isin.Tensor_Tensor, text=_member)


def _along(position: int, default: int) -> Any:
    """The rule for a value and its index along ``dim``, which is the argument at ``position``."""

    def text(call: Call) -> str:
        names = letters(len(call.ins[0]))
        if not names:
            return " -> ,"
        dim = call.arg(position, "dim", default) % len(names)
        keep = call.arg(position + 1, "keepdim", False)
        out = [("1" if i == dim else n) for i, n in enumerate(names) if keep or i != dim]
        return f"{spell(names)} -> {spell(out)}, {spell(out)} | whole {names[dim]}"

    return text


register_rule(aten.kthvalue.default, text=_along(2, -1))
register_rule(aten.mode.default, aten.median.dim, aten.nanmedian.dim, text=_along(1, -1))


def _halves(call: Call) -> str:
    """glu: the second half of a dim gates the first."""
    names = letters(len(call.ins[0]))
    dim = call.arg(1, "dim", -1) % len(names)
    out = ["half" if i == dim else n for i, n in enumerate(names)]
    return f"{spell(names)} -> {spell(out)} | whole half {names[dim]}"


def _halves_backward(call: Call) -> str:
    names = letters(len(call.ins[1]))
    dim = call.arg(2) % len(names)
    half = ["half" if i == dim else n for i, n in enumerate(names)]
    return f"{spell(half)}, {spell(names)} -> {spell(names)} | linear 0 | whole half {names[dim]}"


register_rule(aten.glu.default, text=_halves)
register_rule(aten.glu_backward.default, text=_halves_backward)
