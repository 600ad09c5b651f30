"""Losses with kernels of their own: rows may be split; where classes are, the loss is decomposed."""

from __future__ import annotations

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell

MEAN, SUM = 1, 2


def class_dim(shape: tuple[int, ...]) -> int:
    """The dim of the classes in torch's shapes [c], [n, c] and [n, c, ...]."""
    return min(len(shape) - 1, 1)


def _names(shape: tuple[int, ...]) -> tuple[list[str], list[str], str]:
    """The names of all dims, of the rows' dims, and of the classes."""
    names = letters(len(shape))
    at = class_dim(shape)
    return names, names[:at] + names[at + 1 :], names[at]


def _nll_loss(call: Call) -> str:
    """A sum over rows is a sum of partial sums; a mean needs the weights of all rows, which are whole."""
    names, rows, classes = _names(call.ins[0])
    reduction = call.arg(3)
    ins = [spell(names), spell(rows)] + [classes] * (len(call.ins) - 2)
    out = spell(rows) if len(call.outs[0]) else ""
    whole = [classes, *rows] if reduction == MEAN else [classes]
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
