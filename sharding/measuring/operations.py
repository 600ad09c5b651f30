"""Operations timed where they run: in a program, one after another, on all ranks at once.

What is counted is processor time of the thread: ranks that share processors interrupt each other, for
much longer than a small operation takes.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from torchard.functional.costs.flops import flops, is_product
from torchard.functional.costs.seconds import variant
from torchard.functional.costs.traffic import bytes_touched
from torchard.functional.programs.program import Program
from torchard.functional.programs.views import is_view

__all__ = ["Sample", "mean_of_ranks", "mean_seconds", "median_seconds", "timed"]

_WARMUP = 2


class Sample(NamedTuple):
    """The seconds of an operation, and what it does: FLOPs of products, bytes of memory."""

    name: str
    seconds: float
    flops: int
    bytes: int
    view: bool


def timed(program: Program, inputs: Sequence[Any], rounds: int) -> list[Sample]:
    """Run a program operation by operation, and time each: medians over rounds, means over ranks."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    took: defaultdict[fx.Node, list[float]] = defaultdict(list)
    for number in range(_WARMUP + rounds):
        for node, seconds in _run(program.graph, inputs):
            if number >= _WARMUP:
                took[node].append(seconds)
    counted = [n for n in nodes if n.target is not operator.getitem]
    means = mean_of_ranks(statistics.median(took[node]) for node in counted)
    return [_sample(node, seconds) for node, seconds in zip(counted, means, strict=True)]


def _sample(node: fx.Node, seconds: float) -> Sample:
    multiplied = flops(node) if is_product(node) else 0
    return Sample(variant(node), seconds, multiplied, bytes_touched(node), is_view(node))


def _run(graph: fx.Graph, inputs: Sequence[Any]) -> list[tuple[fx.Node, float]]:
    """The seconds of each node; values are freed after their last use, as programs free them."""
    reads = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
    known: dict[fx.Node, Any] = {}
    took, given = [], iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            began = time.thread_time()
            known[node] = node.target(*args, **kwargs)
            took.append((node, time.thread_time() - began))
            del args, kwargs
        for operand in node.all_input_nodes:
            if reads[operand] is node:
                known.pop(operand, None)
    return took


def median_seconds(run: Callable[[], Any], rounds: int, meet: bool = True) -> float:
    """The median seconds of a call on its slowest rank; ranks begin together if they `meet`."""
    return float(_seconds(run, rounds, meet).median())


def mean_seconds(run: Callable[[], Any], rounds: int) -> float:
    """The mean seconds of a call in which ranks wait for each other, without the slowest eighth.

    A wait now and then takes a time slice of the scheduler, ten times as long as others: a program with
    many of them takes their mean.
    """
    took = _seconds(run, rounds, meet=True).sort().values
    return float(took[: -max(rounds // 8, 1)].mean())


def _seconds(run: Callable[[], Any], rounds: int, meet: bool) -> torch.Tensor:
    took = []
    for _ in range(_WARMUP + rounds):
        if meet and dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        result = run()
        took.append(time.perf_counter() - began)
        del result
    slowest = torch.tensor(took[_WARMUP:], dtype=torch.float64)
    if meet and dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest


def mean_of_ranks(values: Iterable[float]) -> list[float]:
    """The mean over all ranks of each value."""
    means = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    return list(means.tolist())
