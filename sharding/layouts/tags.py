"""Tags that only sharding uses: see functional/programs/tagging.py."""

from __future__ import annotations

from typing import Any

from torchard.functional.programs.tagging import Tag, declare

__all__ = [
    "AFTER",
    "BUCKET",
    "CALL",
    "CHUNK",
    "GATHERED",
    "LOWERED",
    "MICROBATCH",
    "MOVED",
    "OVER",
    "PART_OF",
    "PRECEDENCE",
    "RULE",
    "SOFT",
    "TURN",
    "WEIGHT",
]

# -- remembered while planning ---------------------------------------------------------------------

CALL: Tag[Any] = declare(
    "call",
    "the operation, its tensor operands separated from its settings; cached",
    written_by="rules/registry/call",
    read_by="rules/registry/call",
)
RULE: Tag[Any] = declare(
    "rule",
    "the factor rule of the operation; cached",
    written_by="rules/registry/entries",
    read_by="rules/registry/entries",
)
WEIGHT: Tag[tuple[Any, float]] = declare(
    "weight",
    "a machine, and the seconds of the operation on it per point of its iteration space; cached",
    written_by="planning/decision",
    read_by="planning/decision",
)

# -- in a plan -------------------------------------------------------------------------------------

SOFT: Tag[bool] = declare(
    "soft",
    "whether a constraint is only the spec of an input, and has that input's precedence",
    written_by="planning/constraints",
    read_by="planning/constraints, scheduling/explained/report",
    follows="call",
)
PRECEDENCE: Tag[int] = declare(
    "precedence",
    "of an input, whether a parameter's or the batch's layout it has, which others follow or yield to",
    written_by="shard_rewrite",
    read_by="shard_rewrite",
)
PART_OF: Tag[int] = declare(
    "part_of",
    "the number of the operation that was decomposed into this one and others",
    written_by="decompositions/decompose",
    read_by="scheduling/precision",
    follows="place",
)
GATHERED: Tag[bool] = declare(
    "gathered",
    "whether the operation has no rule that fits its operands, which are gathered",
    written_by="microbatches/spread, scheduling/partition",
    read_by="lowering/lower",
    follows="call",
)
MOVED: Tag[str] = declare(
    "moved",
    "of a reshard step, the name that the value that it moves has in the plan; of an operation, its own",
    written_by="scheduling/partition",
    read_by="scheduling/explained/named",
    follows="call",
)
LOWERED: Tag[Any] = declare(
    "lowered",
    "the function that lowers the node, where its factor rule does not determine that",
    written_by="lowering/lower_manual, lowering/windows",
    read_by="lowering/lower, microbatches/turns",
    follows="call",
)

# -- in a pipeline --------------------------------------------------------------------------------

CHUNK: Tag[tuple[int, tuple[tuple[str, int], ...]]] = declare(
    "chunk",
    "the number of the pipeline's chunk of layers that the operation belongs to, and its home",
    written_by="pipelining/chunks",
    read_by="microbatches/spread, pipelining/homes, pipelining/report, pipelining/tasks, "
    "scheduling/added_sums, stage_specs",
    follows="place",
)
MICROBATCH: Tag[int] = declare(
    "microbatch",
    "the number of the microbatch whose turn computes the node",
    written_by="microbatches/turns",
    read_by="microbatches/turns, pipelining/tasks",
    follows="place",
)

# -- in a schedule, and what is lowered from it ------------------------------------------------------

BUCKET: Tag[Any] = declare(
    "bucket",
    "the bucket of reshard steps that are sent as one collective",
    written_by="scheduling/bucket",
    read_by="lowering/lower, scheduling/casts, scheduling/explained/named, scheduling/gathers, "
    "scheduling/near_gathers, scheduling/scatters",
)
AFTER: Tag[Any] = declare(
    "after",
    "the bucket that must complete before the node's own is issued",
    written_by="scheduling/gathers, scheduling/scatters",
    read_by="lowering/lower",
)
TURN: Tag[int] = declare(
    "turn",
    "the number of the layer in the backward, counted from the first that is differentiated",
    written_by="scheduling/gathers",
    read_by="lowering/lower",
)
OVER: Tag[tuple[int, ...]] = declare(
    "over",
    "in a lowered graph, the ranks that take part in the collective",
    written_by="lowering/channel",
    read_by="lowering/call_order",
    follows="call",
)
