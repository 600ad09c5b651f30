"""Schedules of pipelines: for each rank, which chunk of which microbatch it computes, in which order.

A schedule is data. ``F`` is the forward of a chunk for one microbatch and ``B`` its backward, which may
come in two parts: ``I``, the gradient of the chunk's input, and ``W``, the rest, the gradients of its
weights (Qi et al., arXiv:2401.10241, section 2). `timeline` runs a schedule on a model of the ranks, and
`check` refuses one that cannot be run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchard.functional.core.arguments import check_fields
from torchard.functional.core.errors import PipelineError

__all__ = ["COST", "SCHEDULES", "PipelineSchedule", "Task", "Timeline", "check", "named", "timeline"]


COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""How long a task takes on the model of the ranks."""
_CELL = 3  # characters of one unit of time


class Task(NamedTuple):
    """One piece of a pipeline's work, for custom schedules.

    Attributes:
        chunk: the number of the chunk of layers, in the order of the forward.
        microbatch: the number of the microbatch.
        kind: "F", the forward; "B", the backward; or its two halves, "I", the gradient of the chunk's
            input, and "W", the rest.

    >>> from torchard import Task
    >>> print(Task(chunk=1, microbatch=0, kind="F"))
    F0 of chunk 1
    """

    chunk: int
    microbatch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of chunk {self.chunk}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The tasks of each rank along a pipeline's axis, in order; it prints as a timeline.

    Attributes:
        ranks: the tasks of each rank.
        name: the name in reports.

    >>> from torchard import PipelineSchedule
    >>> print(PipelineSchedule.named("1f1b", 2, 3))
    1f1b: bubble 33%, at most 2, 1 microbatches in flight
    rank 0  F0 F1       B0    F2 B1       B2
    rank 1     F0 B0    F1 B1    F2 B2
    """

    ranks: tuple[tuple[Task, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def named(cls, name: str, ranks: int, microbatches: int) -> PipelineSchedule:
        """A predefined schedule, by its name in `pipeline`, for a number of ranks and microbatches."""
        return named(name, ranks, microbatches)

    def __str__(self) -> str:
        """The tasks of each rank in time, where a forward takes as long as half of a backward.

        The chunks of a rank that has several are a, b, ... in the order of the forward.
        """
        run = timeline(self, lambda task: COST[task.kind])
        held = ", ".join(map(str, run.in_flight))
        lines = [f"{self.name}: bubble {run.bubble:.0%}, at most {held} microbatches in flight"]
        for rank, tasks in enumerate(self.ranks):
            chunks = sorted({task.chunk for task in tasks})
            line = ""
            for task in tasks:
                which = "abcdefgh"[chunks.index(task.chunk)] if len(chunks) > 1 else ""
                cell = _CELL + (len(chunks) > 1)
                line = line.ljust(cell * int(run.starts[task])) + f"{task.kind}{task.microbatch}{which}"
            lines.append(f"rank {rank}  {line}")
        return "\n".join(lines)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return 1 + max(task.chunk for rank in self.ranks for task in rank)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(task.microbatch for rank in self.ranks for task in rank)

    @property
    def rank_of_chunk(self) -> tuple[int, ...]:
        """The rank of each chunk.

        Raises:
            PipelineError: a chunk has no rank, or several.
        """
        at: dict[int, int] = {}
        for number, tasks in enumerate(self.ranks):
            for task in tasks:
                if at.setdefault(task.chunk, number) != number:
                    raise PipelineError(
                        f"schedule {self.name}: chunk {task.chunk} is on ranks {at[task.chunk]} and "
                        f"{number} ({task}); the parameters of a chunk are on one rank."
                    )
        missing = next((c for c in range(self.chunks) if c not in at), None)
        if missing is not None:
            raise PipelineError(f"schedule {self.name}: no rank computes chunk {missing}.")
        return tuple(at[c] for c in range(self.chunks))


class Timeline(NamedTuple):
    """A schedule on the model of the ranks.

    Attributes:
        starts: when each task starts.
        ends: when each task ends.
        length: when the last task ends.
        busy: how long each rank computes.
        in_flight: the most chunks of microbatches on each rank whose forward has run, and whose
            backward has not.
    """

    starts: Mapping[Task, float]
    ends: Mapping[Task, float]
    length: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The time that the busiest rank is idle, relative to the time that it computes."""
        busiest = max(self.busy)
        return self.length / busiest - 1 if busiest else 0.0


def needs(task: Task, chunks: int) -> Iterator[Task]:
    """The tasks whose results a task reads."""
    chunk, microbatch, kind = task
    if kind == "F" and chunk:
        yield Task(chunk - 1, microbatch, "F")
    elif kind in "BI":
        yield Task(chunk, microbatch, "F")
        if chunk + 1 < chunks:
            yield Task(chunk + 1, microbatch, kind)
    elif kind == "W":
        yield Task(chunk, microbatch, "I")


def timeline(
    schedule: PipelineSchedule, cost: Callable[[Task], float] = lambda task: 1.0
) -> Timeline:
    """Run a schedule on a model of the ranks, which compute one task at a time, in order.

    Args:
        schedule: the tasks of each rank.
        cost: how long a task takes; communication takes no time. Tasks that are in no list take none.

    Raises:
        PipelineError: ranks wait for each other. Names the tasks.
    """
    listed = {task for tasks in schedule.ranks for task in tasks}
    at, free = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    left = sum(map(len, schedule.ranks))
    while left:
        moved = False
        for rank, tasks in enumerate(schedule.ranks):
            while at[rank] < len(tasks):
                task = tasks[at[rank]]
                before = [other for other in needs(task, schedule.chunks) if other in listed]
                if any(other not in ends for other in before):
                    break
                starts[task] = max([free[rank], *(ends[other] for other in before)])
                ends[task] = free[rank] = starts[task] + cost(task)
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            raise PipelineError(_stuck(schedule, listed, at, ends))
    busy = tuple(sum(map(cost, tasks)) for tasks in schedule.ranks)
    return Timeline(starts, ends, max(free), busy, tuple(map(_most_in_flight, schedule.ranks)))


def check(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule, if it can be run.

    Raises:
        PipelineError: a task is there twice or not at all, or ranks wait for each other. Names the first.
    """
    _check_complete(schedule)
    timeline(schedule)
    return schedule


def _check_complete(schedule: PipelineSchedule) -> None:
    place = schedule.rank_of_chunk
    kinds = {task.kind for tasks in schedule.ranks for task in tasks}
    wanted = "F" + ("IW" if kinds & {"I", "W"} else "B" if "B" in kinds else "")
    seen: set[Task] = set()
    for tasks in schedule.ranks:
        for task in tasks:
            if task.kind not in wanted or task in seen:
                what = "occurs twice" if task in seen else f"is not one of {', '.join(wanted)}"
                raise PipelineError(f"schedule {schedule.name}: {task} {what}; each task occurs once.")
            seen.add(task)
    for chunk in range(schedule.chunks):
        for microbatch in range(schedule.microbatches):
            for kind in wanted:
                if Task(chunk, microbatch, kind) not in seen:
                    raise PipelineError(
                        f"schedule {schedule.name}: {Task(chunk, microbatch, kind)} is missing on rank "
                        f"{place[chunk]}; each task occurs once."
                    )


def _stuck(
    schedule: PipelineSchedule, listed: set[Task], at: Sequence[int], ends: Mapping[Task, float]
) -> str:
    waits = []
    for rank, tasks in enumerate(schedule.ranks):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            wanted = needs(task, schedule.chunks)
            missing = next(other for other in wanted if other in listed and other not in ends)
            waits.append(f"rank {rank} waits with {task} for {missing}")
    return (
        f"schedule {schedule.name}: ranks wait for each other: {'; '.join(waits)}. Move the tasks that "
        "others wait for forward in the lists of their ranks."
    )


def _most_in_flight(tasks: Sequence[Task]) -> int:
    held, most = 0, 0
    last = next((kind for kind in "WB" if any(task.kind == kind for task in tasks)), "F")
    for task in tasks:
        held += task.kind == "F"
        most = max(most, held)
        held -= task.kind == last
    return most


# -- the given schedules ---------------------------------------------------------------------------


def _gpipe(ranks: int, microbatches: int) -> Iterator[Iterator[Task]]:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965, figure 2)."""
    for rank in range(ranks):
        yield (Task(rank, m, kind) for kind in "FB" for m in range(microbatches))


def _one_f_one_b(ranks: int, microbatches: int, each: int = 1) -> Iterator[Iterator[Task]]:
    """After a warm-up, a forward and a backward in turn (Narayanan et al., arXiv:2104.04473, 2.2).

    With several chunks on each rank their turns are interleaved, in groups of as many microbatches as
    there are ranks.
    """
    groups = [range(m, m + ranks) for m in range(0, microbatches, ranks)]
    turns = [(c, m) for group in groups for c in range(each) for m in group]
    backs = [(c, m) for group in groups for c in reversed(range(each)) for m in group]
    for rank in range(ranks):
        ahead = ranks - rank - 1 if each == 1 else 2 * (ranks - rank - 1) + (each - 1) * ranks
        forwards = [Task(c * ranks + rank, m, "F") for c, m in turns]
        backwards = [Task(c * ranks + rank, m, "B") for c, m in backs]
        tasks = _alternate(forwards, backwards, ahead)
        yield (task for task in tasks if task.microbatch < microbatches)  # the last group may be smaller


def _alternate(forwards: list[Task], backwards: list[Task], ahead: int) -> Iterator[Task]:
    yield from forwards[:ahead]
    for task, back in itertools.zip_longest(forwards[ahead:], backwards):
        yield from filter(None, (task, back))


def _interleaved(ranks: int, microbatches: int) -> Iterator[Iterator[Task]]:
    return _one_f_one_b(ranks, microbatches, 2)


def _zb_h1(ranks: int, microbatches: int) -> Iterator[Iterator[Task]]:
    """1F1B whose weight gradients wait, the longer the later the stage (Qi et al., section 2.3.1).

    So all ranks have as many microbatches in flight as the first of 1F1B, and at the end, where they
    would wait for one another, they compute weight gradients.
    """
    for rank in range(ranks):
        yield _delayed(rank, ranks - rank - 1, microbatches)


def _delayed(rank: int, ahead: int, microbatches: int) -> Iterator[Task]:
    yield from (Task(rank, m, "F") for m in range(min(ahead, microbatches)))
    for m in range(microbatches):
        if m + ahead < microbatches:
            yield Task(rank, m + ahead, "F")
        yield Task(rank, m, "I")
        if m >= rank:
            yield Task(rank, m - rank, "W")
    yield from (Task(rank, m, "W") for m in range(max(microbatches - rank, 0), microbatches))


def _zb_v(ranks: int, microbatches: int) -> Iterator[Iterator[Task]]:
    """Two chunks on each rank, the second in reverse order of ranks (Qi et al., section 6).

    The last chunk is on the first rank, so its backward can start as soon as a forward is through.
    """
    for rank in range(ranks):
        tasks = _v_shaped(rank, ranks, max(microbatches, 2 * ranks - 1))
        yield (task for task in tasks if task.microbatch < microbatches)


def _v_shaped(rank: int, ranks: int, microbatches: int) -> Iterator[Task]:
    """The tasks of a rank, for at least as many microbatches as it has in flight."""
    chunks = rank, 2 * ranks - 1 - rank
    counts = {(kind, c): itertools.count() for kind in "FIW" for c in chunks}
    begun = 0

    def do(kinds: str, which: int) -> Iterator[Task]:
        for kind in kinds:
            yield Task(chunks[which], next(counts[kind, chunks[which]]), kind)

    down = 2 * (ranks - rank) - 1
    for _ in range(down):
        yield from do("F", 0)
    for _ in range(rank):
        yield from do("F", 1)
        yield from do("F", 0)
    for _ in range(ranks - rank):
        yield from do("FIW", 1)
    begun, through = down + rank, ranks
    while through < microbatches:
        if begun < microbatches:
            yield from do("F", 0)
            begun += 1
        yield from do("IW", 0)
        yield from do("FIW", 1)
        through += 1
    late = [0, 0]
    for _ in range(rank):
        yield from do("I", 0)
        yield from do("I", 1)
        late = [late[0] + 1, late[1] + 1]
    for _ in range(ranks - rank):
        yield from do("I", 0)
        yield from do("W", 0)
    for which in (1, 0):
        for _ in range(late[which]):
            yield from do("W", which)


Make = Callable[[int, int], Iterator[Iterator[Task]]]
_GIVEN: dict[str, Make] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
SCHEDULES = tuple(_GIVEN)
"""The names of the given schedules."""


def named(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """A given schedule for some ranks along the pipeline's axis, and some microbatches."""
    return PipelineSchedule(tuple(map(tuple, _GIVEN[name](ranks, microbatches))), name)
