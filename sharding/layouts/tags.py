"""Tags that only sharding uses: see functional/programs/tagging.py."""

from __future__ import annotations

from typing import Any

from torchard.functional.programs.tagging import Tag, declare

__all__ = [
    "AFTER",
    "BUCKET",
    "CALL",
    "GATHERED",
    "LOWERED",
    "OVER",
    "PART_OF",
    "RULE",
    "SOFT",
    "TURN",
    "WEIGHT",
]

# -- remembered while planning ---------------------------------------------------------------------

CALL: Tag[Any] = declare(
    "call",
    "the operation with its operands told apart from its settings, made once",
    written_by="rules/registry",
    read_by="rules/registry",
)
RULE: Tag[Any] = declare(
    "rule",
    "the factor rule of the operation, looked up once",
    written_by="rules/registry",
    read_by="rules/registry",
)
WEIGHT: Tag[float] = declare(
    "weight",
    "the work of the operation, in relation to its points, counted once",
    written_by="planning/decision",
    read_by="planning/decision",
)

# -- in a plan -------------------------------------------------------------------------------------

SOFT: Tag[bool] = declare(
    "soft",
    "of a constraint, that it is the spec of an input, not one that was asked for",
    written_by="planning/constraints",
    read_by="planning/constraints",
    follows="call",
)
PART_OF: Tag[int] = declare(
    "part_of",
    "the number of the operation that came apart into this one",
    written_by="decompositions/decompose",
    read_by="scheduling/precision",
    follows="place",
)
GATHERED: Tag[bool] = declare(
    "gathered",
    "it has no rule for its operands, which are whole",
    written_by="scheduling/partition",
    read_by="lowering/lower",
    follows="call",
)
LOWERED: Tag[Any] = declare(
    "lowered",
    "how the node is lowered, where no rule says so",
    written_by="lowering/lower_manual, lowering/windows",
    read_by="lowering/lower",
    follows="call",
)

# -- in a schedule, and what is lowered from it ------------------------------------------------------

BUCKET: Tag[Any] = declare(
    "bucket",
    "the steps that are sent with it, as one call",
    written_by="scheduling/bucket",
    read_by="lowering/lower, scheduling/gathers",
)
AFTER: Tag[Any] = declare(
    "after",
    "the bucket that must have arrived before the node's own is issued",
    written_by="scheduling/gathers",
    read_by="lowering/lower",
)
TURN: Tag[int] = declare(
    "turn",
    "of the backward, how many layers are behind it",
    written_by="scheduling/gathers",
    read_by="lowering/lower",
)
OVER: Tag[tuple[str, ...]] = declare(
    "over",
    "in a lowered graph, the mesh axes along which processes take part",
    written_by="lowering/channel",
    read_by="lowering/call_order",
    follows="call",
)
