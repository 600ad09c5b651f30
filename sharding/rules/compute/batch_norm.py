"""Batch norm: in training only channels may be split; where other dims are, it is decomposed."""

from __future__ import annotations

from torchard.functional.effects.batch_norm import PURE
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell


def _image(call: Call) -> tuple[str, list[str]]:
    """The dims of the input, and the names of all but the channel dim."""
    names = letters(len(call.ins[0]))
    return spell(names), [names[0], *names[2:]]


def _dims(shape: tuple[int, ...], image: str, channels: int, rank: int) -> str:
    """The dims of an operand or result: the input's, a vector's over channels, or an empty tensor's."""
    if len(shape) == rank:
        return image
    return "d1" if shape == (channels,) else "none"


def _clauses(kind: str, names: list[str]) -> str:
    return "".join(f" | {kind.format(name)}" for name in names)


def _batch_norm(call: Call) -> str:
    image, others = _image(call)
    channels, rank = call.ins[0][1], len(call.ins[0])
    ins, outs = ([_dims(s, image, channels, rank) for s in shapes] for shapes in (call.ins, call.outs))
    whole = _clauses("whole {}", others) if call.arg(5) else ""
    return f"{', '.join(ins)} -> {', '.join(outs)}{whole}{_empty_clause(outs)}"


def _batch_norm_backward(call: Call) -> str:
    image, others = _image(call)
    channels, rank = call.ins[0][1], len(call.ins[0])
    ins, outs = ([_dims(s, image, channels, rank) for s in shapes] for shapes in (call.ins, call.outs))
    training, mask = call.arg(7), call.arg(9)
    clauses = _clauses("whole {}", others) if training else ""
    if not training and (mask[1] or mask[2]):
        clauses = _clauses("reduce {} sum", others)
    return f"{', '.join(ins)} -> {', '.join(outs)}{clauses}{_empty_clause([*ins, *outs])}"


def _empty_clause(texts: list[str]) -> str:
    """The clause on empty tensors (statistics that are not kept), whose dim may not be split."""
    return " | whole none" if "none" in texts else ""


register_rule(PURE, aten.native_batch_norm.default, text=_batch_norm)
register_rule(aten.native_batch_norm_backward.default, text=_batch_norm_backward)
