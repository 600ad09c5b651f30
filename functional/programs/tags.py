"""The tags that more than one room knows, and those of functional; how they are used is in tagging.py."""

from __future__ import annotations

from typing import Any

from torchard.functional.core.scope_frames import Frame
from torchard.functional.programs.tagging import TORCH, Tag, declare

__all__ = [
    "APART",
    "COLLECTIVE",
    "CUT",
    "FRAMES",
    "KERNEL",
    "LAYOUT",
    "NAME",
    "OFFLOAD",
    "PEERS",
    "PHASE",
    "RECOMPUTE",
    "RESIDUAL",
    "SCOPE",
    "SEGMENTS",
    "SHAPE",
    "SOURCE",
    "STAGE",
    "STEP",
    "STRIDED",
    "USE",
    "VAL",
    "WEAK",
    "WHY",
]

# -- what torch writes -----------------------------------------------------------------------------

VAL: Tag[Any] = declare(
    "val",
    "fake tensor (or a tuple of them): the global shape, dtype and device",
    written_by=TORCH,
    read_by="many",
    follows="value",
)
for _name in ("from_node", "original_aten", "seq_nr", "stack_trace", "tensor_meta"):
    declare(_name, "torch's own; reserved", written_by=TORCH, read_by=TORCH)

# -- where a node was made -------------------------------------------------------------------------

SOURCE: Tag[str | None] = declare(
    "source",
    "\"model.py:12 in mlp\", the user's line that made the node",
    written_by="planning/constraints, tracing/trace_state",
    read_by="many",
    follows="place",
)
SCOPE: Tag[str] = declare(
    "scope",
    '"block/3", the enclosing torchard.scope',
    written_by="tracing/trace_state",
    read_by="many",
    follows="place",
)
FRAMES: Tag[tuple[Frame, ...]] = declare(
    "frames",
    "the entries of scopes and the calls of transforms it was made in",
    written_by="tracing/trace_state",
    read_by="remat/budget, remat/segments, tracing/trace_state",
    follows="place",
)
SEGMENTS: Tag[tuple[Any, ...]] = declare(
    "segments",
    "the checkpointed segments it is in, outermost first",
    written_by="remat/rematerialise, remat/segments, tracing/trace_state",
    read_by="remat/segments, rewriting/replace, rewriting/search, tracing/trace_state",
    follows="place",
)
PHASE: Tag[str] = declare(
    "phase",
    '"forward" or "backward"',
    written_by="remat/offload, remat/rematerialise, tracing/purify, tracing/trace_state",
    read_by="many",
    follows="place",
)
RECOMPUTE: Tag[bool] = declare(
    "recompute",
    "made again for the backward; no split may save it",
    written_by="remat/offload, remat/rematerialise",
    read_by="many",
    follows="place",
)

# -- what is known of it while it is traced --------------------------------------------------------

NAME: Tag[str] = declare(
    "name",
    "the label that torchard.name gave the value",
    written_by="tracing/trace_state",
    read_by="many",
    follows="value",
)
CUT: Tag[bool] = declare(
    "cut",
    "the user's own detach, or a view of what was detached: no gradient passes",
    written_by="effects/scatters, tracing/trace_state",
    read_by="effects/grad_dependent_ops, effects/writes, reports/text, tracing/purify",
    follows="call",
)
STRIDED: Tag[tuple[tuple[str, bool], ...]] = declare(
    "strided",
    "of an input, the lines that read its memory by strides, and whether from its offset",
    written_by="tracing/strided_inputs",
    read_by="tracing/strided_inputs",
    follows="value",
)
WEAK: Tag[bool] = declare(
    "weak",
    "of an input, that it was a Python float, which does not promote",
    written_by="tracing/trace_call",
    read_by="tracing/purify",
    follows="value",
)

# -- what checkpoints and splits did ---------------------------------------------------------------

RESIDUAL: Tag[bool] = declare(
    "residual",
    "a split saves the value for the backward",
    written_by="remat/split",
    read_by="reports/text",
)
WHY: Tag[str] = declare(
    "why",
    "why the backward finds the value kept",
    written_by="remat/rematerialise",
    read_by="reports/residuals",
)
OFFLOAD: Tag[bool] = declare(
    "offload",
    "it takes the value to the host, for the backward",
    written_by="remat/offload",
    read_by="programs/views, reports/text",
    follows="call",
)

# -- what other rooms say, and this one prints or decides by -----------------------------------------

KERNEL: Tag[str] = declare(
    "kernel",
    "the name of the fused kernel the node stands for",
    written_by="rewriting/search",
    read_by="engine/lowered_function, remat/rematerialise, reports/text",
    follows="call",
)
USE: Tag[Any] = declare(
    "use",
    "a record of what the kernel took the place of",
    written_by="rewriting/search",
    read_by="decompositions/decompose, programs/program",
    follows="call",
)
APART: Tag[Any] = declare(
    "apart",
    "such a record, on what has come of a kernel that was taken apart again",
    written_by="decompositions/decompose",
    read_by="programs/program",
    follows="place",
)
LAYOUT: Tag[Any] = declare(
    "layout",
    "how the value (each of a tuple) is laid out over a mesh; printable",
    written_by="scheduling/collectives, scheduling/partition, scheduling/precision",
    read_by="many",
    follows="value",
)
STEP: Tag[Any] = declare(
    "step",
    "the reshard that the node is: the identity on the global value",
    written_by="scheduling/collectives",
    read_by="many",
    follows="call",
)
COLLECTIVE: Tag[Any] = declare(
    "collective",
    "a record of what the node sends over the network: printable, and it may have a short "
    "title and a payload. In a lowered graph, on the calls that do it",
    written_by="many",
    read_by="many",
    follows="call",
)
STAGE: Tag[str] = declare(
    "stage",
    'in a lowered graph, "issue" or "wait", where other processes take part',
    written_by="lowering/channel",
    read_by="lowering/call_order, programs/labels",
    follows="call",
)
PEERS: Tag[str] = declare(
    "peers",
    "there, a sentence on who takes part",
    written_by="lowering/channel",
    read_by="programs/labels",
    follows="call",
)
SHAPE: Tag[tuple[int, ...]] = declare(
    "shape",
    "there, the local shape, where it is known",
    written_by="lowering/lower, lowering/peephole, lowering/simulated_transport",
    read_by="lowering/peephole, remat/barrier",
    follows="value",
)
