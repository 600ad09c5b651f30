"""The tags that several packages use, and those of functional; see tagging.py for how they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchard.functional.core.scope_frames import Frame
from torchard.functional.programs.markers import Iteration, Loop
from torchard.functional.programs.tagging import TORCH, Tag, declare

__all__ = [
    "AHEAD",
    "APART",
    "BRANCH",
    "CHECKS",
    "COLLECTIVE",
    "COORDINATES",
    "CUT",
    "ENDS",
    "FRAMES",
    "HALF",
    "HALVES",
    "INDUCTOR_REALIZE_TO_STRIDES",
    "ITERATION",
    "KERNEL",
    "LAYOUT",
    "LOOP",
    "NAME",
    "OFFLOAD",
    "ORIGIN",
    "PEERS",
    "PHASE",
    "PLAN",
    "RECOMPUTE",
    "RESIDUAL",
    "RUNNING",
    "SCHEDULE",
    "SCOPE",
    "SEGMENTS",
    "SHAPE",
    "SOURCE",
    "STAGE",
    "STEP",
    "STRIDED",
    "TASK",
    "USE",
    "VAL",
    "WEAK",
    "WHY",
    "Checks",
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

INDUCTOR_REALIZE_TO_STRIDES: Tag[bool] = declare(
    "inductor_realize_to_strides",
    "torch's own: Inductor stores the value, and does not compute it again where it is read",
    written_by="compiling/compiler_repairs, compiling/writes_in_place",
    read_by="compiling/compiler_repairs",
)

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
    written_by="loops/recognised, loops/rolled, programs/unrolled, tracing/trace_state",
    read_by="many",
    follows="place",
)
ORIGIN: Tag[int] = declare(
    "origin",
    "the number, within its trace, of the forward operation that it is or is part of the backward of",
    written_by="loops/rolled, programs/unrolled, tracing/trace_state",
    read_by="many",
    follows="place",
)
FRAMES: Tag[tuple[Frame, ...]] = declare(
    "frames",
    "the entries of scopes and the calls of transforms it was made in",
    written_by="loops/recognised, loops/rolled, programs/unrolled, tracing/trace_state",
    read_by="many",
    follows="place",
)
SEGMENTS: Tag[tuple[Any, ...]] = declare(
    "segments",
    "the checkpointed segments it is in, outermost first",
    written_by="many",
    read_by="many",
    follows="place",
)
PHASE: Tag[str] = declare(
    "phase",
    '"forward" or "backward"',
    written_by="loops/rolled, remat/loop_residuals, remat/offload, remat/rematerialise, tracing/purify, "
    "tracing/trace_state",
    read_by="many",
    follows="place",
)
HALF: Tag[str] = declare(
    "half",
    '"forward" or "backward": the half of the joint program whose peak is computed',
    written_by="remat/liveness",
    read_by="remat/liveness",
    follows="place",
)
RECOMPUTE: Tag[bool] = declare(
    "recompute",
    "recomputed for the backward; no split may save it",
    written_by="remat/offload, remat/rematerialise",
    read_by="many",
    follows="place",
)

# -- of rolled programs ----------------------------------------------------------------------------

LOOP: Tag[Loop] = declare(
    "loop",
    "the loop in whose iterations the operation runs, in a rolled program",
    written_by="many",
    read_by="many",
    follows="place",
)

BRANCH: Tag[object] = declare(
    "branch",
    "the branch of a conditional that the operation is in; computed only if that is taken, it is neither "
    "merged with equal operations nor saved by a split",
    written_by="loops/rolled",
    read_by="loops/rolled, remat/split",
    follows="place",
)

ITERATION: Tag[Iteration] = declare(
    "iteration",
    "in an unrolled program, which operation of which loop it is an iteration of",
    written_by="programs/unrolled",
    read_by="reports/residuals",
)

AHEAD: Tag[int] = declare(
    "ahead",
    "how many iterations before its own the operation is issued",
    written_by="scheduling/gathers",
    read_by="compiling/regions, execution/choices, execution/phases, programs/loops, remat/budget",
    follows="place",
)

# -- known while it is traced ----------------------------------------------------------------------

NAME: Tag[str] = declare(
    "name",
    "the label that torchard.name gave the value",
    written_by="microbatches/turns, tracing/trace_state",
    read_by="many",
    follows="value",
)
CUT: Tag[bool] = declare(
    "cut",
    "the user's own detach, or a view of what was detached: no gradient passes",
    written_by="effects/scatters, tracing/trace_state",
    read_by="effects/aliases, effects/grad_dependent_ops, effects/writes, reports/text, "
    "tracing/autograd_state, tracing/purify",
    follows="call",
)
STRIDED: Tag[tuple[tuple[str, bool], ...]] = declare(
    "strided",
    "the lines that read an input's memory by strides, and whether by offsets into its storage",
    written_by="tracing/strided_inputs",
    read_by="tracing/strided_inputs",
    follows="value",
)
WEAK: Tag[bool] = declare(
    "weak",
    "the input is a Python float, which promotes weakly",
    written_by="tracing/trace_call",
    read_by="tracing/purify",
    follows="value",
)



@dataclass(frozen=True)
class Checks:
    """What is wrong in an operation's result: NaN, infinities; and indices past the end of a dim."""

    nan: bool
    inf: bool
    index: bool

    def and_those(self, other: Checks | None) -> Checks:
        """These, and others: a function that is checked may call one that is."""
        if other is None:
            return self
        return Checks(self.nan or other.nan, self.inf or other.inf, self.index or other.index)


CHECKS: Tag[Checks] = declare(
    "checks",
    "what to look for in the result when it is computed",
    written_by="callbacks/checked",
    read_by="callbacks/checked, checks/looks, compiling/regions, execution/codegen, jit, "
    "lowering/lower",
    follows="place",
)
COORDINATES: Tag[str] = declare(
    "coordinates",
    "who runs the operation, for checks: \"rank dp=1\" of a virtual mesh, \"microbatch 2\"",
    written_by="lowering/lower, microbatches/turns",
    read_by="lowering/lower, programs/labels",
    follows="place",
)

# -- written by checkpoints and splits -------------------------------------------------------------

RESIDUAL: Tag[bool] = declare(
    "residual",
    "a split saves the value for the backward",
    written_by="remat/split",
    read_by="reports/text",
)
WHY: Tag[Any] = declare(
    "why",
    "a record of why the backward reads the saved value",
    written_by="programs/unrolled, remat/barrier, remat/rematerialise",
    read_by="programs/unrolled, reports/residuals",
)
HALVES: Tag[Any] = declare(
    "halves",
    "on the output of a half of a joint program: the split that made it",
    written_by="remat/split",
    read_by="execution/donated, jit, updates/merging",
)
OFFLOAD: Tag[bool] = declare(
    "offload",
    "it copies the value to the host, for the backward",
    written_by="remat/offload",
    read_by="programs/views, reports/text",
    follows="call",
)

# -- written by other packages, printed or read here -------------------------------------------------

KERNEL: Tag[str] = declare(
    "kernel",
    "the name of the fused kernel the node stands for",
    written_by="rewriting/search",
    read_by="engine/lowered_function, remat/rematerialise, reports/text",
    follows="call",
)
USE: Tag[Any] = declare(
    "use",
    "a record of the operations that the kernel replaced",
    written_by="rewriting/findings, rewriting/search",
    read_by="decompositions/decompose, programs/program",
    follows="call",
)
APART: Tag[Any] = declare(
    "apart",
    "such a record, on the operations of a kernel that was decomposed again",
    written_by="decompositions/decompose",
    read_by="programs/program",
    follows="place",
)
LAYOUT: Tag[Any] = declare(
    "layout",
    "how the value (each of a tuple) is laid out over a mesh; printable",
    written_by="many",
    read_by="many",
    follows="value",
)
STEP: Tag[Any] = declare(
    "step",
    "the reshard that the node is: the identity on the global value",
    written_by="pipelining/homes, scheduling/collectives",
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
TASK: Tag[str] = declare(
    "task",
    "the task of a pipeline's schedule that the operation belongs to",
    written_by="pipelining/tasks",
    read_by="compiling/regions, programs/labels, reports/clock, reports/time",
    follows="place",
)
PLAN: Tag[Callable[[Any], Any]] = declare(
    "plan",
    "on the output of a program on a mesh: makes the report of its plan from the program",
    written_by="shard_rewrite",
    read_by="reports/lowered",
    follows="call",
)
SCHEDULE: Tag[Callable[[Any], Any]] = declare(
    "schedule",
    "on the output of a pipeline: makes the report of its schedule from the program",
    written_by="pipeline",
    read_by="reports/lowered",
)
RUNNING: Tag[bool] = declare(
    "running",
    "in a lowered graph, that the sum may be computed in place; whether it adds a product",
    written_by="lowering/lower",
    read_by="programs/running_sums",
)
STAGE: Tag[str] = declare(
    "stage",
    'in a lowered graph, "issue" or "wait", where other processes take part',
    written_by="lowering/channel",
    read_by="many",
    follows="call",
)
PEERS: Tag[str] = declare(
    "peers",
    "in a lowered graph, a sentence that names the ranks that take part",
    written_by="lowering/channel",
    read_by="programs/labels",
    follows="call",
)
ENDS: Tag[tuple[str, int, int]] = declare(
    "ends",
    "in a lowered graph, of a value that one rank sends to another: the axis, and their coordinates",
    written_by="lowering/direct_sends",
    read_by="reports/clock",
    follows="call",
)
SHAPE: Tag[tuple[int, ...]] = declare(
    "shape",
    "in a lowered graph, the local shape, where it is known",
    written_by="lowering/lower, lowering/peephole, lowering/simulated_transport",
    read_by="execution/reinplacing, lowering/peephole, remat/barrier",
    follows="value",
)
