"""Batch norm: channels are free, and in training all other dims are whole (``decompose`` steps in)."""

from __future__ import annotations

from torchard.functional.effects.batch_norm import PURE
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell


def _image(call: Call) -> tuple[str, list[str]]:
    """The input's dims, and those that are not channels."""
    names = letters(len(call.ins[0]))
    return spell(names), [names[0], *names[2:]]


def _of(shape: tuple[int, ...], image: str, channels: int, rank: int) -> str:
    """An image, a vector of channels, or statistics that are not there (no elements)."""
    if len(shape) == rank:
        return image
    return "d1" if shape == (channels,) else "none"


def _clauses(kind: str, names: list[str]) -> str:
    return "".join(f" | {kind.format(name)}" for name in names)


def _batch_norm(call: Call) -> str:
    image, others = _image(call)
    channels, rank = call.ins[0][1], len(call.ins[0])
    ins, outs = ([_of(s, image, channels, rank) for s in some] for some in (call.ins, call.outs))
    whole = _clauses("whole {}", others) if call.arg(5) else ""
    return f"{', '.join(ins)} -> {', '.join(outs)}{whole}{_nothing(outs)}"


def _batch_norm_backward(call: Call) -> str:
    image, others = _image(call)
    channels, rank = call.ins[0][1], len(call.ins[0])
    ins, outs = ([_of(s, image, channels, rank) for s in some] for some in (call.ins, call.outs))
    training, mask = call.arg(7), call.arg(9)
    clauses = _clauses("whole {}", others) if training else ""
    if not training and (mask[1] or mask[2]):
        clauses = _clauses("reduce {} sum", others)
    return f"{', '.join(ins)} -> {', '.join(outs)}{clauses}{_nothing([*ins, *outs])}"


def _nothing(texts: list[str]) -> str:
    return " | whole none" if "none" in texts else ""


register_rule(PURE, aten.native_batch_norm.default, text=_batch_norm)
register_rule(aten.native_batch_norm_backward.default, text=_batch_norm_backward)
