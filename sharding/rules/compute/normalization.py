"""Normalisations: normalised dims are whole; where they are split, the operation is decomposed."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell


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
    """The gradients of weight and bias are sums over rows; that of x has all rows."""
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
    """torch's CPU kernel assumes contiguous means and scales, which shards need not be."""
    grad, x, shape, mean, scale, *rest = local.args
    stats = [local.call(aten.contiguous.default, s) for s in (mean, scale)]
    return local.call(call.target, grad, x, shape, *stats, *rest)


register_rule(
    aten.native_layer_norm_backward.default,
    text=_layer_norm_backward,
    emit=_emit_layer_norm_backward,
)


def _group_dims(shape: tuple[int, ...], groups: int) -> tuple[str, str, str]:
    """The dims of image and channels, and the clause on what may not be split."""
    area = [f"s{i}" for i in range(len(shape) - 2)]
    return spell(["n", f"(g={groups} c)", *area]), f"(g={groups} c)", f" | whole {spell(['c', *area])}"


def _group_norm(call: Call) -> str | None:
    if 0 in call.ins[0]:
        return None
    image, channels, whole = _group_dims(call.ins[0], call.arg(6))
    ins = [image] + [channels] * (len(call.ins) - 1)
    return f"{', '.join(ins)} -> {image}, n g, n g{whole}"


def _group_norm_backward(call: Call) -> str | None:
    """The gradients of weight and bias are sums over the batch."""
    if 0 in call.ins[0]:
        return None
    image, channels, whole = _group_dims(call.ins[0], call.arg(8))
    ins = [image, image, "n g", "n g"] + [channels] * (len(call.ins) - 4)
    of_all = zip((image, channels, channels), call.arg(9), strict=True)
    outs = [dims for dims, asked in of_all if asked]
    return f"{', '.join(ins)} -> {', '.join(outs)}{whole}"


def _emit_group_norm(call: Call, local: Local) -> Any:
    return _with_local_sizes(call, local, 3)


def _emit_group_norm_backward(call: Call, local: Local) -> Any:
    return _with_local_sizes(call, local, 5)


def _with_local_sizes(call: Call, local: Local, at: int) -> Any:
    """Apply the kernel with local sizes (batch at ``at``, channels, image, groups) in its arguments.

    The kernel refuses operands that are not contiguous, as a slice may be.
    """
    args, (n, channels, *_) = list(local.args), local.operand_shape(0)
    for i in range(at):
        if args[i] is not None:
            args[i] = local.call(aten.contiguous.default, args[i])
    groups = args[at + 3] * channels // args[at + 1]
    args[at], args[at + 1], args[at + 3] = n, channels, groups
    return local.call(call.target, *args)


register_rule(aten.native_group_norm.default, text=_group_norm, emit=_emit_group_norm)
register_rule(
    aten.native_group_norm_backward.default,
    text=_group_norm_backward,
    emit=_emit_group_norm_backward,
)
