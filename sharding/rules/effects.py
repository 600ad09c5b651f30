"""Rules for effects and opaque calls: whole values; one rank performs an effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchard.functional.core.errors import PurityError
from torchard.functional.programs.markers import Effect, PureCall, after, first
from torchard.sharding.rules.registry import (
    Call,
    Local,
    OpRule,
    find,
    letters,
    register_rule,
    spell,
)

__all__: list[str] = []

register_rule(first, text="->")
register_rule(after, text="..., -> ...")  # not of a pending sum: all of it is before the effect


def _whole(call: Call) -> str:
    """Each operand, and each result, has dims of its own, none of which may be split."""
    names = letters(sum(map(len, (*call.ins, *call.outs))))
    taken = iter(names)
    ins, outs = (
        [spell([next(taken) for _ in shape]) for shape in each] for each in (call.ins, call.outs)
    )
    whole = f" | whole {spell(names)}" if names else ""
    return f"{', '.join(ins)} -> {', '.join(outs)}{whole}"


def _emit_effect(call: Call, local: Local) -> Any:
    effect: Effect = call.target
    if effect.results and local.is_distributed():
        raise PurityError(
            f"{effect.where}{effect.name}: on a mesh of several processes one of them would have the "
            "result. Use pure_callback, or call it outside and pass the result."
        )
    silent = local.is_distributed() and not (effect.everywhere or local.is_first())
    target = replace(effect, perform=_nothing) if silent else effect
    return local.call(target, *local.args, **local.kwargs)


def _nothing(*values: Any) -> None:
    """What other ranks do where one performs an effect."""


@find
def _rule(target: Any) -> OpRule | None:
    if isinstance(target, Effect):
        return OpRule(_whole, _emit_effect, False, None)
    if isinstance(target, PureCall):
        return OpRule(_whole, None, False, None)
    return None
