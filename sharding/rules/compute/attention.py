"""Attention: batch, heads and query positions may be split; key and value positions may not.

The query heads of grouped-query attention are written ``(h r)``: r query heads read each of h key
heads, so splitting h splits queries, keys and values alike. The kernel's causal mask assumes that its
first query is at position 0; a shard of the queries that starts elsewhere is given its rows of the mask
explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule

_MASKED = float("-inf")


def attention_dims(query: Sequence[int], key: Sequence[int]) -> tuple[str, str, str] | None:
    """The dims of query, key and value [batch, heads, length, width]; None if groups are uneven."""
    heads, groups = query[1], key[1]
    if groups == 0 or heads % groups:
        return None
    query_heads = "h" if heads == groups else f"(h={groups} r={heads // groups})"
    return f"b {query_heads} s d", "b h t d", "b h t e"


def mask_dims(mask: Sequence[int], scores: Sequence[int], heads: str) -> str:
    """The dims of a mask, which broadcasts to the scores [batch, heads, queries, keys]."""
    names = ["b", heads, "s", "t"][4 - len(mask) :]
    sizes = scores[4 - len(mask) :]
    return " ".join(n if m == s else "1" for n, m, s in zip(names, mask, sizes, strict=True))


def _clauses(causal: bool) -> str:
    return " | whole t d e" + (" | run s" if causal else "")


def _attention(call: Call) -> str | None:
    query, key, *_ = call.ins
    named = attention_dims(query, key)
    if named is None or call.arg(3, "dropout_p", 0.0):
        return None
    heads = named[0].removeprefix("b ").removesuffix(" s d")
    ins = [*named]
    if len(call.ins) == 4:
        ins.append(mask_dims(call.ins[3], (*query[:3], key[2]), heads))
    clauses = _clauses(bool(call.arg(4, "is_causal", False)))
    return f"{', '.join(ins)} -> b {heads} s e, b {heads} s{clauses}"


def _attention_backward(call: Call) -> str | None:
    """The gradients of keys and values are summed over the queries and query heads that read them."""
    _, query, key, *_ = call.ins
    named = attention_dims(query, key)
    if named is None or call.arg(6):
        return None
    heads = named[0].removeprefix("b ").removesuffix(" s d")
    out = f"b {heads} s e"
    ins = [out, *named, out, f"b {heads} s"]
    if len(call.ins) == 7:
        ins.append(mask_dims(call.ins[6], (*query[:3], key[2]), heads))
    return f"{', '.join(ins)} -> {', '.join(named)}{_clauses(bool(call.arg(7)))} | linear 0"


def _rows_of_causal_mask(local: Local, query: Any, rows: range, keys: int, like: Any) -> Any:
    """Rows of an additive causal mask [rows, keys]: 0 where a query attends to a key, -inf elsewhere."""
    on = {"device": like.device}
    row = local.call(aten.arange.start_step, rows.start, rows.stop, 1, **on)
    column = local.call(aten.arange.start_step, 0, keys, 1, **on)
    hidden = local.call(aten.lt.Tensor, local.call(aten.unsqueeze.default, row, 1), column)
    zeros = local.call(aten.new_zeros.default, query, [len(rows), keys])
    return local.call(aten.masked_fill.Scalar, zeros, hidden, _MASKED)


def _emit(call: Call, local: Local, query: int, causal: int) -> Any:
    """Apply the kernel to a shard; causal queries that do not start at 0 are given a mask.

    Args:
        query: the index of the query among the operands.
        causal: the position of the argument ``is_causal``.
    """
    args = list(local.args)
    rows = local.operand_range(query, 2) if call.arg(causal, "is_causal", False) else range(0)
    if rows.start == 0:
        return local.call(call.target, *args, **local.kwargs)
    keys = call.ins[query + 1][2]
    args = [*args[:causal], False]
    args += [0.0] * (causal + 1 - len(args))
    like = VAL.of(call.operands[query])
    mask = _rows_of_causal_mask(local, local.args[query], rows, keys, like)
    rest = {k: v for k, v in local.kwargs.items() if k != "is_causal"}
    return local.call(call.target, *args, **{**rest, "attn_mask": mask})


def _emit_attention(call: Call, local: Local) -> Any:
    return _emit(call, local, 0, 4)


def _emit_attention_backward(call: Call, local: Local) -> Any:
    return _emit(call, local, 1, 7)


register_rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    text=_attention,
    emit=_emit_attention,
)
register_rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    text=_attention_backward,
    emit=_emit_attention_backward,
)
