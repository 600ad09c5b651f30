"""Convolution: batch, groups, input and output channels may be split; spatial dims may not.

Input channels are contracted, so splitting them leaves partial sums. The channels of a grouped
convolution are written ``(g i)`` and ``(g o)``, so that the groups can be split.
"""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule


def _names(spatial: int, groups: int, transposed: bool) -> tuple[str, str, str]:
    """The dims of input, weight and output; ``spatial`` is the number of spatial dims."""
    pixels = " ".join(f"x{i}" for i in range(spatial))
    kernel = " ".join(f"k{i}" for i in range(spatial))
    pixels_out = " ".join(f"y{i}" for i in range(spatial))
    if groups == 1:
        weight = f"i o {kernel}" if transposed else f"o i {kernel}"
        return f"n i {pixels}", weight, f"n o {pixels_out}"
    channels = f"(g={groups} i)", f"(g={groups} o)"
    weight = f"{channels[0]} o {kernel}" if transposed else f"{channels[1]} i {kernel}"
    return f"n {channels[0]} {pixels}", weight, f"n {channels[1]} {pixels_out}"


def _whole(spatial: int) -> str:
    return " | whole " + " ".join(f"{c}{i}" for c in "xky" for i in range(spatial))


def _bias(groups: int) -> str:
    return "o" if groups == 1 else f"(g={groups} o)"


def _is_batched(call: Call, operand: int) -> bool:
    """Whether an operand has a batch dim; torch's functions add one to unbatched inputs."""
    return len(call.ins[operand]) >= 3


def _convolution(call: Call) -> str | None:
    transposed, groups = bool(call.arg(6)), int(call.arg(8))
    if not _is_batched(call, 0):
        return None
    spatial = len(call.ins[0]) - 2
    x, w, y = _names(spatial, groups, transposed)
    if len(call.ins) == 3:  # each shard of the input channels would add the bias
        return f"{x}, {w}, {_bias(groups)} -> {y}{_whole(spatial)} i"
    return f"{x}, {w} -> {y}{_whole(spatial)} | linear 0 | linear 1"


def _convolution_backward(call: Call) -> str | None:
    transposed, groups, mask = bool(call.arg(7)), int(call.arg(9)), call.arg(10)
    if not _is_batched(call, 1):
        return None
    spatial = len(call.ins[0]) - 2
    x, w, y = _names(spatial, groups, transposed)
    wanted = [dims for dims, asked in zip((x, w, _bias(groups)), mask, strict=True) if asked]
    # A gradient is summed over the factors it lacks: the weight's over the batch, that of x over output
    # channels. That of the bias does not depend on input channels: each shard of them computes all of it.
    whole = _whole(spatial) + (" i" if mask[2] else "")
    return f"{y}, {x}, {w} -> {', '.join(wanted)}{whole} | linear 0"


def _groups(channels: int, group_size: int) -> int:
    """The number of local groups; the weight's second dim holds the channels of one group."""
    return max(channels // max(group_size, 1), 1)


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
        args[3] = [local.operand_shape(0)[1]]  # the size of the bias: output channels
    return local.call(call.target, *args)


register_rule(aten.convolution.default, text=_convolution, emit=_emit_convolution)
register_rule(
    aten.convolution_backward.default,
    text=_convolution_backward,
    emit=_emit_convolution_backward,
)
