"""Convolution: batch, channels in and channels out may be split, and groups; the image is whole.

Channels in are contracted, so their parts add up. A grouped convolution has its channels written
``(g c)`` and is split by groups.
"""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule


def _names(image: int, groups: int, transposed: bool) -> tuple[str, str, str]:
    """Input, weight and output by their factors; ``image`` is the number of its dims."""
    seen = " ".join(f"x{i}" for i in range(image))
    kernel = " ".join(f"k{i}" for i in range(image))
    made = " ".join(f"y{i}" for i in range(image))
    if groups == 1:
        weight = f"i o {kernel}" if transposed else f"o i {kernel}"
        return f"n i {seen}", weight, f"n o {made}"
    channels = f"(g={groups} i)", f"(g={groups} o)"
    weight = f"{channels[0]} o {kernel}" if transposed else f"{channels[1]} i {kernel}"
    return f"n {channels[0]} {seen}", weight, f"n {channels[1]} {made}"


def _whole(image: int) -> str:
    return " | whole " + " ".join(f"{c}{i}" for c in "xky" for i in range(image))


def _bias(groups: int) -> str:
    return "o" if groups == 1 else f"(g={groups} o)"


def _is_batched(call: Call, operand: int) -> bool:
    """Without a batch dim, channels come first; torch adds the dim before it comes here."""
    return len(call.ins[operand]) >= 3


def _convolution(call: Call) -> str | None:
    transposed, groups = bool(call.arg(6)), int(call.arg(8))
    if not _is_batched(call, 0):
        return None
    image = len(call.ins[0]) - 2
    x, w, y = _names(image, groups, transposed)
    if len(call.ins) == 3:  # the bias would be added once per part of the contracted channels
        return f"{x}, {w}, {_bias(groups)} -> {y}{_whole(image)} i"
    return f"{x}, {w} -> {y}{_whole(image)} | linear 0 | linear 1"


def _convolution_backward(call: Call) -> str | None:
    transposed, groups, mask = bool(call.arg(7)), int(call.arg(9)), call.arg(10)
    if not _is_batched(call, 1):
        return None
    image = len(call.ins[0]) - 2
    x, w, y = _names(image, groups, transposed)
    wanted = [of for of, asked in zip((x, w, _bias(groups)), mask, strict=True) if asked]
    # What a result does not have is summed in it: the batch in the weight's, channels out in x's.
    # That of the bias knows no channels in: each of their parts would bring it once.
    whole = _whole(image) + (" i" if mask[2] else "")
    return f"{y}, {x}, {w} -> {', '.join(wanted)}{whole} | linear 0"


def _groups(channels: int, of_weight: int) -> int:
    """The groups that are local: the weight's second dim has the channels of one group."""
    return max(channels // max(of_weight, 1), 1)


def _emit_convolution(call: Call, local: Local) -> Any:
    args = list(local.args)
    outer = local.shape() if call.arg(6) else local.operand_shape(0)
    args[8] = _groups(outer[1], local.operand_shape(1)[1])
    return local.call(call.target, *args)


def _emit_convolution_backward(call: Call, local: Local) -> Any:
    args = list(local.args)
    outer = local.operand_shape(0 if call.arg(7) else 1)
    args[9] = _groups(outer[1], local.operand_shape(2)[1])
    if args[3] is not None:
        args[3] = [local.operand_shape(0)[1]]  # the bias's size, which is that of channels out
    return local.call(call.target, *args)


register_rule(aten.convolution.default, text=_convolution, emit=_emit_convolution)
register_rule(
    aten.convolution_backward.default,
    text=_convolution_backward,
    emit=_emit_convolution_backward,
)
