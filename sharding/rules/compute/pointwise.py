"""Pointwise operations: all that torch tags as such, and in which operands they are linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import holds
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten, prims
from torchard.sharding.rules.registry import Call, OpRule, find, register_rule


def _body(call: Call) -> str:
    ins, outs = (", ".join(["..."] * len(shapes)) for shapes in (call.ins, call.outs))
    return f"{ins} -> {outs}"


def _plain(call: Call) -> str:
    return _body(call)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _linear_sum(call: Call) -> str:
    """add, sub: jointly linear in two tensors; with a nonzero number they are affine, not linear."""
    a, b = call.arg(0), call.arg(1)
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return f"{_body(call)} | linear 0 1"
    return f"{_body(call)} | linear 0" if _is_zero(b) else _body(call)


def _linear_each(call: Call) -> str:
    """mul: linear in each operand separately."""
    return _body(call) + "".join(f" | linear {i}" for i in range(len(call.operands)))


def _linear_first(call: Call) -> str:
    """div, neg, and every ``*_backward(grad_output, ...)``: linear in the first operand."""
    first = isinstance(call.arg(0), fx.Node)
    return f"{_body(call)} | linear 0" if first else _body(call)


def _linear_where(call: Call) -> str:
    """where: jointly linear in its two values, if both are tensors."""
    if len(call.operands) == 3:
        return f"{_body(call)} | linear 1 2"
    return _body(call)


def _linear_cast(call: Call) -> str:
    """A cast is linear unless it narrows, so that pending sums are added in the wider dtype."""
    before = VAL.of(call.operands[0]).dtype
    after = VAL.of(call.node).dtype
    return f"{_body(call)} | linear 0" if holds(after, before) else _body(call)


def _linear_fill(call: Call) -> str:
    return f"{_body(call)} | linear 0" if _is_zero(call.arg(2)) else _body(call)


register_rule(aten.add.Tensor, aten.sub.Tensor, text=_linear_sum)
register_rule(aten.mul.Tensor, aten.mul.Scalar, text=_linear_each)
register_rule(
    aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.real.default, text=_linear_first
)
register_rule(
    aten._conj.default, aten._neg_view.default, aten._conj_physical.default, text="... -> ... | linear 0"
)
register_rule(aten.view_as_real.default, text="... -> ... two | linear 0")
register_rule(aten.view_as_complex.default, text="... two -> ... | linear 0 | whole two")
register_rule(aten.where.self, text=_linear_where)
register_rule(aten.masked_fill.Scalar, text=_linear_fill)
register_rule(
    aten._to_copy.default, prims.convert_element_type.default, text=_linear_cast
)
register_rule(aten.clone.default, aten.detach.default, text="... -> ... | linear 0", alias=False)
register_rule(aten.alias.default, aten.lift_fresh_copy.default, text="... -> ... | linear 0")


def _like(call: Call) -> str:
    return _body(call)


register_rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    text=_like,
)


# Pointwise operations that torch does not tag as such.
_UNTAGGED = {
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "complex",
    "elu_backward",
    "fill",
    "floor_divide",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "masked_fill",
    "mish_backward",
    "polar",
    "rsub",
    "softplus_backward",
    "softshrink_backward",
    "zero",
}


def _is_pointwise(target: Any) -> bool:
    if not isinstance(target, internals.OpOverload):
        return False
    untagged = target.namespace == "aten" and internals.schema(target).name[6:] in _UNTAGGED
    return untagged or torch.Tag.pointwise in target.tags


@find
def _pointwise(target: Any) -> OpRule | None:
    if not _is_pointwise(target):
        return None
    schema = internals.schema(target)
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if not all(str(r.type) == "Tensor" for r in schema.returns):
        return None  # aten.equal is tagged pointwise, but returns a bool
    first = schema.arguments[0].name if schema.arguments else ""
    if first in ("grad_output", "grad_out") and "backward" in schema.name:
        return OpRule(_linear_first)
    return OpRule(_plain)
