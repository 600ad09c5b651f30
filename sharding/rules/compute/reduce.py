"""Reductions: sums, maxima and minima of shards combine; others need whole dims, or are decomposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell


def reduced_dims(dims: Any, rank: int) -> list[int]:
    """The dims that an operation reduces: all of them for None and, as in torch, for an empty list."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    listed: Sequence[int] = [dims] if isinstance(dims, int) else list(dims)
    return [d % rank if rank else 0 for d in listed][: None if rank else 0]


def _reduction(call: Call, dims: Any, keepdim: bool, clause: str, results: int = 1) -> str:
    """The rule with this clause on each reduced dim, and n results of the same shape."""
    rank = len(call.ins[0])
    names, reduced = letters(rank), set(reduced_dims(dims, rank))
    out = ["1" if i in reduced else n for i, n in enumerate(names) if keepdim or i not in reduced]
    outs = ", ".join([spell(out)] * results)
    clauses = "".join(f" | {clause.format(names[d])}" for d in sorted(reduced))
    return f"{spell(names)} -> {outs}{clauses}"


def _sum_dims(call: Call) -> str:
    text = _reduction(call, call.arg(1, "dim"), bool(call.arg(2, "keepdim", False)), "reduce {} sum")
    return f"{text} | linear 0"


def _sum_all(call: Call) -> str:
    return f"{_reduction(call, None, False, 'reduce {} sum')} | linear 0"


def _extreme(op: str) -> Any:
    def text(call: Call) -> str:
        dims, keep = call.arg(1, "dim", []), bool(call.arg(2, "keepdim", False))
        return _reduction(call, dims, keep, f"reduce {{}} {op}")

    return text


def _extreme_all(op: str) -> Any:
    def text(call: Call) -> str:
        return _reduction(call, None, False, f"reduce {{}} {op}")

    return text


def _whole(results: int) -> Any:
    def text(call: Call) -> str:
        dims, keep = call.arg(1, "dim"), bool(call.arg(2, "keepdim", False))
        return _reduction(call, dims, keep, "whole {}", results)

    return text


def _whole_all(call: Call) -> str:
    return _reduction(call, None, False, "whole {}")


register_rule(aten.sum.dim_IntList, text=_sum_dims)
register_rule(aten.sum.default, text=_sum_all)
register_rule(aten.amax.default, text=_extreme("max"))
register_rule(aten.amin.default, text=_extreme("min"))
register_rule(aten.max.default, text=_extreme_all("max"))
register_rule(aten.min.default, text=_extreme_all("min"))
register_rule(aten.any.default, text=_extreme_all("max"))
register_rule(aten.all.default, text=_extreme_all("min"))
register_rule(aten.any.dim, text=_extreme("max"))
register_rule(aten.all.dim, text=_extreme("min"))
register_rule(aten.mean.default, aten.prod.default, text=_whole_all)
register_rule(
    aten.mean.dim,
    aten.prod.dim_int,
    aten.argmax.default,
    aten.argmin.default,
    text=_whole(1),
)
register_rule(aten.logsumexp.default, text=_whole(1))
register_rule(aten.max.dim, aten.min.dim, text=_whole(2))


def _sort_stable(call: Call) -> str:
    names = letters(len(call.ins[0]))
    dim = call.arg(2, "dim", -1)
    whole = f" | whole {names[dim]}" if names else ""
    return f"{spell(names)} -> {spell(names)}, {spell(names)}{whole}"


def _topk(call: Call) -> str:
    names = letters(len(call.ins[0]))
    if not names:
        return "-> ,"
    out, dim = list(names), call.arg(2, "dim", -1)
    out[dim] = "k"
    return f"{spell(names)} -> {spell(out)}, {spell(out)} | whole {names[dim]} k"


register_rule(aten.sort.stable, text=_sort_stable)
register_rule(aten.topk.default, text=_topk)


def _var(results: int) -> Any:
    def text(call: Call) -> str:
        keep = bool(call.node.kwargs.get("keepdim", call.arg(3, "keepdim", False)))
        return _reduction(call, call.arg(1, "dim"), keep, "whole {}", results)

    return text


def _norm(call: Call) -> str:
    return _reduction(call, call.arg(2, "dim"), bool(call.arg(3, "keepdim", False)), "whole {}")


register_rule(aten.linalg_vector_norm.default, text=_norm)
register_rule(aten.var.correction, aten.std.correction, text=_var(1))
register_rule(aten.var_mean.correction, text=_var(2))
