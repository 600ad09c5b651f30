"""Creation: each rank makes its own shard, from the global indices that it owns."""

from __future__ import annotations

from typing import Any

import torch

import torchard.functional.random  # noqa: F401  defines random_bits
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, register_rule, spell


def _constant(call: Call) -> str:
    names = letters(len(call.outs[0]))
    free = f" | free {spell(names)}" if names else ""
    return f"-> {spell(names)}{free}"


def _emit_sized_first(call: Call, local: Local) -> Any:
    return local.call(call.target, local.shape(), *local.args[1:], **local.kwargs)


def _new_constant(call: Call) -> str:
    """new_zeros(x, size): only the dtype of x matters; ``canonicalize.py`` writes it without x."""
    source = letters(len(call.ins[0]))
    ins = [f"x{n}" for n in source]
    outs = letters(len(call.outs[0]))
    free = f" | free {spell(outs)}" if outs else ""
    whole = f" | whole {spell(ins)}" if ins else ""
    return f"{spell(ins)} -> {spell(outs)}{free}{whole}"


def _emit_sized_second(call: Call, local: Local) -> Any:
    return local.call(call.target, local.args[0], local.shape(), *local.args[2:], **local.kwargs)


register_rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    text=_constant,
    emit=_emit_sized_first,
)
register_rule(aten.scalar_tensor.default, text="->")
register_rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    text=_new_constant,
    emit=_emit_sized_second,
)


def _emit_arange(call: Call, local: Local) -> Any:
    """Integer ranges start at the shard's first index; others are slices of the global range."""
    size, own = call.outs[0][0], local.result_range(0)
    if len(own) == size:
        return local.call(call.target, *local.args, **local.kwargs)
    if VAL.of(call.node).dtype.is_floating_point:
        whole = local.call(call.target, *local.args, **local.kwargs)
        return local.call(aten.slice.Tensor, whole, 0, own.start, own.stop)
    start, step = _arange_bounds(call)
    bounds = (start + own.start * step, start + own.stop * step, step)
    return local.call(aten.arange.start_step, *bounds, **local.kwargs)


def _arange_bounds(call: Call) -> tuple[Any, Any]:
    if call.target is aten.arange.default:
        return 0, 1
    return call.arg(0), call.arg(2, "step", 1)


register_rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    text="-> i | index i | run i",
    emit=_emit_arange,
)


def _spaced(call: Call) -> str:
    """linspace and logspace: the ends may be scalar tensors."""
    return f"{', '.join([''] * len(call.ins))} -> i | index i | run i"


def _emit_cut(call: Call, local: Local) -> Any:
    """Slice the shard from the global value along the last dim, to be bitwise equal."""
    dim = len(call.outs[0]) - 1
    own, whole = local.result_range(dim), local.call(call.target, *local.args, **local.kwargs)
    return local.call(aten.slice.Tensor, whole, dim, own.start, own.stop)


register_rule(
    *(
        getattr(packet, overload)
        for packet in (aten.linspace, aten.logspace)
        for overload in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
    text=_spaced,
    emit=_emit_cut,
)
register_rule(
    aten.tril_indices.default,
    aten.triu_indices.default,
    text="-> two i | index i | run i",
    emit=_emit_cut,
)


def _emit_eye(call: Call, local: Local) -> Any:
    rows, columns = local.result_range(0), local.result_range(1)
    device = VAL.of(call.node).device
    i = local.call(aten.arange.start, rows.start, rows.stop, device=device)
    j = local.call(aten.arange.start, columns.start, columns.stop, device=device)
    equal = local.call(aten.eq.Tensor, local.call(aten.unsqueeze.default, i, 1), j)
    return local.call(aten._to_copy.default, equal, dtype=VAL.of(call.node).dtype)


register_rule(
    aten.eye.default, aten.eye.m, text="-> i j | index i j | run i j", emit=_emit_eye
)


def _bits(call: Call) -> str:
    batch = letters(len(call.ins[0]) - 1)
    dims = [f"i{k}" for k in range(len(call.outs[0]) - len(batch))]
    index = f" | index {spell(dims)} | run {spell(dims)}" if dims else ""
    return f"{spell([*batch, 'two'])} -> {spell(batch + dims)}{index} | whole two"


def _emit_bits(call: Call, local: Local) -> Any:
    """Bits are a function of key and global index, so a rank draws only its shard, on every mesh."""
    key, size, begin = local.args[0], list(call.arg(1)), list(call.arg(2))
    batch = len(call.ins[0]) - 1
    own = [local.result_range(batch + d) for d in range(len(size))]
    start = [b + r.start for b, r in zip(begin, own, strict=True)]
    stop = [b + r.stop for b, r in zip(begin, own, strict=True)]
    return local.call(call.target, key, size, start, stop)


# The operation of the keyed generator, which the import of `random` above defines.
register_rule(torch.ops.torchard.random_bits.default, text=_bits, emit=_emit_bits)
