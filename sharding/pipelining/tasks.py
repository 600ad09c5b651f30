"""The operations of a pipelined program, by task and in the order of its schedule.

Each operation belongs to a task: its chunk, its microbatch, and ``F``, ``I`` or ``W``. The graph is put
in the order in which a timeline of the schedule starts the tasks, so each rank, which runs the
operations at its home in the order of the graph, does its tasks in the order of its list. What is in no
task (weight casts, optimizers) comes right before its first user, or at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from torchard.functional.programs.graphs import output_node
from torchard.functional.programs.tags import COLLECTIVE, PHASE, TASK
from torchard.sharding.layouts.tags import CHUNK, MICROBATCH
from torchard.sharding.pipelining.schedules import COST, PipelineSchedule, Task, timeline

__all__ = ["arrange", "is_whole", "microbatches_of", "tag_tasks", "tasks_of"]


def microbatches_of(graph: fx.Graph) -> int:
    """The number of microbatches that a graph computes one after another."""
    return 1 + max((MICROBATCH.get(node, 0) for node in graph.nodes), default=0)


def tasks_of(graph: fx.Graph, whole: bool = False) -> dict[fx.Node, Task]:
    """The task of each operation that belongs to one.

    Args:
        whole: whether the backward of a chunk is one task.
    """
    chunk_of = _chunks(graph)
    alone = not any(map(MICROBATCH.on, graph.nodes))  # the entire batch is one microbatch
    tasks: dict[fx.Node, Task] = {}
    late: set[fx.Node] = set()
    for node, chunk in chunk_of.items():
        if PHASE.get(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)  # what a forward computes from gradients, too
        if alone or MICROBATCH.on(node):
            kind = "F" if node not in late else "B" if whole else "W"
            tasks[node] = Task(chunk, MICROBATCH.get(node, 0), kind)
    if not whole:
        for node in reversed(graph.nodes):
            if node in tasks and tasks[node].kind == "W" and _feeds_backward(node, tasks):
                tasks[node] = tasks[node]._replace(kind="I")
    return tasks


def _feeds_backward(node: fx.Node, tasks: dict[fx.Node, Task]) -> bool:
    """Whether the backward of another chunk waits for a node of a backward."""
    mine = tasks[node]
    for user in node.users:
        other = tasks.get(user)
        if other is None or other.microbatch != mine.microbatch:
            continue
        if other.kind == "I" or (other.kind != "F" and other.chunk != mine.chunk):
            return True
    return False


def _chunks(graph: fx.Graph) -> dict[fx.Node, int]:
    """The chunk of each operation; without a tag that of its last operand, in the backward its first."""
    chunk_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if CHUNK.on(node):
            chunk_of[node] = CHUNK.of(node)[0]
            continue
        known = [chunk_of[source] for source in node.all_input_nodes if source in chunk_of]
        if known:
            chunk_of[node] = min(known) if PHASE.get(node) == "backward" else max(known)
    return chunk_of


def is_whole(schedule: PipelineSchedule) -> bool:
    """Whether the backward of a chunk is one task."""
    return any(task.kind == "B" for tasks in schedule.ranks for task in tasks)


def tag_tasks(graph: fx.Graph, schedule: PipelineSchedule) -> dict[fx.Node, Task]:
    """Tag operations with their tasks, for errors and profiles; return the task of each."""
    tasks = tasks_of(graph, is_whole(schedule))
    for node, task in tasks.items():
        TASK.set(node, str(task))
        if COLLECTIVE.on(node):
            record = COLLECTIVE.of(node)
            note = ", ".join(filter(None, (str(task), record.note)))
            COLLECTIVE.set(node, replace(record, note=note))
    return tasks


def arrange(graph: fx.Graph, tasks: Mapping[fx.Node, Task], schedule: PipelineSchedule) -> None:
    """Put the operations of a graph in the order of a schedule."""
    of_task: dict[Task, list[fx.Node]] = {}
    for node, task in tasks.items():
        of_task.setdefault(task, []).append(node)
    run = timeline(schedule, lambda task: COST[task.kind])
    ranks = schedule.rank_of_chunk
    in_time = sorted(run.starts, key=lambda task: (run.starts[task], ranks[task.chunk]))
    order = _with_operands(node for task in in_time for node in of_task.get(task, ()))
    _with_operands((node for node in graph.nodes if node.op == "call_function"), order)
    out = output_node(graph)
    for node in order:
        out.prepend(node)


def _with_operands(
    nodes: Iterable[fx.Node], order: dict[fx.Node, None] | None = None
) -> dict[fx.Node, None]:
    """Nodes in this order, each after the nodes that it needs."""
    order = {} if order is None else order
    for wanted in nodes:
        stack = [wanted]
        while stack:
            node = stack[-1]
            missing = _missing(node, order) if node not in order else []
            stack.extend(reversed(missing))
            if not missing:
                order.setdefault(stack.pop())
    return order


def _missing(node: fx.Node, order: dict[fx.Node, None]) -> Sequence[fx.Node]:
    return [n for n in node.all_input_nodes if n.op == "call_function" and n not in order]
