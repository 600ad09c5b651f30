"""Losses with their own kernels: rows may be split, classes only once ``decompose`` has stepped in."""

from __future__ import annotations

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell

MEAN, SUM = 1, 2


def class_dim(shape: tuple[int, ...]) -> int:
    """Where torch has the classes: [c], [n, c], [n, c, ...]."""
    return min(len(shape) - 1, 1)


def _names(shape: tuple[int, ...]) -> tuple[list[str], list[str], str]:
    names = letters(len(shape))
    at = class_dim(shape)
    return names, names[:at] + names[at + 1 :], names[at]


def _nll_loss(call: Call) -> str:
    """A sum of rows is a sum of parts; a mean needs the weights of all rows, so its rows are whole."""
    names, rows, classes = _names(call.ins[0])
    how = call.arg(3)
    ins = [spell(names), spell(rows)] + [classes] * (len(call.ins) - 2)
    out = spell(rows) if len(call.outs[0]) else ""
    whole = [classes, *rows] if how == MEAN else [classes]
    return f"{', '.join(ins)} -> {out}, | whole {' '.join(whole)}"


def _nll_loss_backward(call: Call) -> str:
    names, rows, classes = _names(call.ins[1])
    grad = spell(rows) if call.ins[0] else ""
    weight = [classes] * (len(call.ins) - 4)
    ins = [grad, spell(names), spell(rows), *weight, ""]
    return f"{', '.join(ins)} -> {spell(names)} | whole {classes} | linear 0"


register_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, text=_nll_loss)
register_rule(
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, text=_nll_loss_backward
)
