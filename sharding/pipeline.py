"""pipeline: a function's layers on the ranks along a mesh axis, through which microbatches pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.core.errors import PipelineError
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import SCHEDULE
from torchard.sharding.accumulate import Accumulate
from torchard.sharding.microbatches.mark import Batch
from torchard.sharding.pipelining.chunks import assign_chunks
from torchard.sharding.pipelining.report import report_of
from torchard.sharding.pipelining.schedules import SCHEDULES, PipelineSchedule, check, named
from torchard.sharding.pipelining.tasks import arrange, microbatches_of, tag_tasks
from torchard.sharding.shard_rewrite import Shard
from torchard.sharding.values.mesh import Mesh

__all__ = ["Pipeline", "pipeline"]


@checked
def pipeline(
    fn: Callable[..., Any],
    mesh: Mesh,
    axis: str,
    *,
    stages: str | Sequence[str] | None = None,
    microbatches: Annotated[int, AtLeast(1)] = 1,
    batch: Any = None,
    schedule: str | PipelineSchedule = "1f1b",
) -> Transformed:
    """Compute a function's layers on different ranks, with microbatches of its batch passing through.

    The result is that of ``fn``. The ranks at each coordinate of the axis are a stage, which computes
    some of the layers; activations are sent from stage to stage, and their gradients back. Where ``fn``
    takes the gradients itself, forwards and backwards of microbatches alternate as the schedule says;
    where they are taken of the result, all forwards come first. Sums over the batch are added up as
    `accumulate` does. Parameters that are placed at a stage (``P(...).at(pp=1)``) are on its ranks only,
    and so are their gradients.

    Args:
        fn: a pure function of pytrees.
        mesh: the mesh; its other axes split values within a stage, as `shard` plans.
        axis: the axis whose coordinates are stages.
        stages: patterns of `torchard.scope`, one for each stage (or chunk); or one pattern, such as
            ``"block/*"`` or ``"layers.*"``, each outermost match of which is a layer that is on one
            stage, with all scopes inside of it; by default the forward is cut between any two operations.
            With one pattern, or none, the costliest stage is as cheap as it can be, by FLOPs and bytes.
        microbatches: the number of slices of the batch.
        batch: which dim of which arguments is the batch, as for `accumulate`.
        schedule: "gpipe", "1f1b", "interleaved" (two chunks of layers on each rank), "zb-h1", "zb-v"
            (two chunks), or a `PipelineSchedule`.

    Returns:
        A function that computes the same as ``fn``.

    Raises:
        PipelineError: the mesh has no such axis; there is no such schedule, or one that cannot be run.
        PipelineError (when called): a pattern matches no scope, or two match one; stages form a cycle.
        AccumulateError (when called): as for `accumulate`.

    Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473, section 2.2; Qi et
    al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.

    >>> import torch, torchard as ta
    >>> def loss(params, x):
    ...     for i, w in enumerate(params):
    ...         with ta.scope(f"layer/{i}"):
    ...             x = torch.tanh(x @ w)
    ...     return x.square().mean()
    >>> mesh = ta.Mesh({"pp": 2}, virtual=True)
    >>> params, x = [torch.eye(4) for _ in range(4)], torch.ones(8, 4)
    >>> step = ta.pipeline(torch.func.grad(loss), mesh, "pp", microbatches=4, batch=(None, 0))
    >>> grads = step(params, x)
    >>> all(torch.allclose(g.full(), h) for g, h in zip(grads, torch.func.grad(loss)(params, x)))
    True
    """
    kept = stages if stages is None or isinstance(stages, str) else tuple(stages)
    slices = None
    if microbatches > 1:
        caller = "pipeline", "microbatches"
        slices = Accumulate(microbatches, batch, fn, recompute=False, caller=caller)
    return Transformed(fn, (Pipeline(mesh, axis, kept, schedule, slices),))


@dataclass(frozen=True)
class Pipeline(Rewrite):
    """The rewrite of `pipeline`.

    Operations are assigned to stages, then the batch is sliced; `shard` plans how values are split within
    a stage, and sends them between stages; then the tasks of the schedule are put in its order.
    """

    mesh: Mesh
    axis: str
    stages: str | tuple[str, ...] | None = None
    how: str | PipelineSchedule = "1f1b"
    slices: Accumulate | None = None

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.shape:
            raise PipelineError(
                f"pipeline(axis={self.axis!r}): {self.mesh} has no such axis; its axes are "
                f"{', '.join(self.mesh.axes)}."
            )
        if isinstance(self.how, str) and self.how not in SCHEDULES:
            raise PipelineError(
                f"pipeline(schedule={self.how!r}): no such schedule; the given ones are "
                f"{', '.join(map(repr, SCHEDULES))}."
            )

    def __repr__(self) -> str:
        return f"pipeline({self.mesh}, {self.axis!r})"

    @property
    def passes(self) -> tuple[Pass, ...]:
        # Layers are on different ranks: there is nothing to advise on their loops.
        cut, order = Pass(Stage.CUT, self, remedy=""), Pass(Stage.ORDER, self.order, True)
        return cut, *(() if self.slices is None else self.slices.passes), order

    @property
    def asks(self) -> tuple[Rewrite, ...]:
        return Shard(self.mesh), *(() if self.slices is None else self.slices.asks)

    def annotate(self, program: Program) -> Program:
        """Check the dims of the batch, and attach them to the leaves as hints."""
        return program if self.slices is None else self.slices.annotate(program)

    def schedule(self, microbatches: int) -> PipelineSchedule:
        """The schedule for a number of microbatches."""
        ranks = self.mesh.shape[self.axis]
        if isinstance(self.how, str):
            return named(self.how, ranks, microbatches)
        if (len(self.how.ranks), self.how.microbatches) != (ranks, microbatches):
            raise PipelineError(
                f"pipeline(schedule={self.how.name}): it is for {len(self.how.ranks)} ranks and "
                f"{self.how.microbatches} microbatches; axis {self.axis!r} has {ranks} ranks, and there "
                f"are {microbatches} microbatches."
            )
        return check(self.how)

    def __call__(self, program: Program) -> Program:
        """The program with its operations tagged by their chunks."""
        program = program.copy()
        chunks = self.schedule(self._microbatches(program)).rank_of_chunk
        homes = [((self.axis, rank),) if self.mesh.shape[self.axis] > 1 else () for rank in chunks]
        assign_chunks(program.graph, self.stages, homes, program.name)
        return program

    def _microbatches(self, program: Program) -> int:
        """The number of microbatches, with those of an accumulate around it."""
        hints = [hint.steps for leaf in program.inputs if (hint := leaf.hint(Batch)) is not None]
        return max(hints, default=1 if self.slices is None else self.slices.steps)

    def order(self, program: Program) -> Program:
        """The program with its operations in the order of the schedule's tasks, in place."""
        count = microbatches_of(program.graph)
        schedule = self.schedule(count)
        tasks = tag_tasks(program.graph, schedule)
        if count > 1:
            arrange(program.graph, tasks, schedule)
        SCHEDULE.set(program.output, lambda planned: report_of(planned, self.mesh, self.axis, schedule))
        return program

    def inline(self, program: Program) -> Program:
        """The program with marks on its batches; the enclosing trace's lowering makes it a pipeline."""
        marked = program if self.slices is None else self.slices.marked(program)
        return replace(marked, asks=(*program.asks, self))
