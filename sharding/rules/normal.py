"""Normalisations: the normalised dims are whole; where they are split, ``decompose`` steps in."""

from __future__ import annotations

from typing import Any

import torch

from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell

aten = torch.ops.aten


def _softmax(call: Call) -> str:
    names = letters(len(call.ins[0]))
    whole = f" | whole {names[call.arg(1)]}" if names else ""
    return f"{spell(names)} -> {spell(names)}{whole}"


def _softmax_backward(call: Call) -> str:
    names = letters(len(call.ins[0]))
    whole = f" | whole {names[call.arg(2)]}" if names else ""
    return f"{spell(names)}, {spell(names)} -> {spell(names)}{whole} | linear 0"


register_rule(aten._softmax.default, aten._log_softmax.default, text=_softmax)
register_rule(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    text=_softmax_backward,
)


def _layer_norm(call: Call) -> str:
    names = letters(len(call.ins[0]))
    inner = len(call.arg(1))
    outer, normed = names[: len(names) - inner], names[len(names) - inner :]
    ins = [spell(names)] + [spell(normed)] * (len(call.ins) - 1)
    stats = spell(outer + ["1"] * inner)
    whole = "".join(f" | whole {n}" for n in normed)
    return f"{', '.join(ins)} -> {spell(names)}, {stats}, {stats}{whole}"


register_rule(aten.native_layer_norm.default, text=_layer_norm)


def _layer_norm_backward(call: Call) -> str:
    """The gradients of weight and bias sum over the rows, that of x keeps them."""
    names = letters(len(call.ins[0]))
    inner = len(call.arg(2))
    outer, normed = names[: len(names) - inner], names[len(names) - inner :]
    stats = spell(outer + ["1"] * inner)
    ins = [spell(names), spell(names), stats, stats] + [spell(normed)] * (len(call.ins) - 4)
    outs = [spell(names) if len(s) == len(names) else spell(normed) for s in call.outs]
    if inner == len(names):
        outs = [spell(names)] * len(call.outs)
    clauses = "".join(f" | reduce {n} sum" for n in outer) + "".join(
        f" | whole {n}" for n in normed
    )
    return f"{', '.join(ins)} -> {', '.join(outs)}{clauses}"


def _emit_layer_norm_backward(call: Call, local: Local) -> Any:
    """torch's CPU kernel reads mean and scale as if they were contiguous; a slice need not be."""
    grad, x, shape, mean, scale, *rest = local.args
    stats = [local.call(aten.contiguous.default, s) for s in (mean, scale)]
    return local.call(call.target, grad, x, shape, *stats, *rest)


register_rule(
    aten.native_layer_norm_backward.default,
    text=_layer_norm_backward,
    emit=_emit_layer_norm_backward,
)
