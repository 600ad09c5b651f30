"""The overheads of torchard: tracing and planning once, and each cached call."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from by_torchard import SPECS, gradients, placed
from timing import per_call, together
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from workload import Problem, Shape

from torchard import Mesh, P, load, place, save, shard
from torchard.functional.torch_internals import FakeTensorMode
from torchard.sharding.checkpointing.items import checksum_of
from torchard.sharding.lowering.call_order import CallOrder

__all__ = ["calls", "comparing", "planning", "storing"]

LEAVES = (1, 4, 16, 64, 256)
STORED = 1 << 26  # bytes


def planning(shape: Shape, mesh: Mesh, repeats: int = 5) -> tuple[float, float, float]:
    """The median seconds of make_fx alone, of trace and plan, and of the first call."""
    problem = Problem.of(shape)
    layers = placed(problem, mesh)

    def bare() -> None:
        with FakeTensorMode() as mode:
            args = _faked((problem.layers, problem.x, problem.cotangent), mode)
            make_fx(gradients)(*args)

    def fresh() -> Any:
        return shard(gradients, mesh, out_specs=(([SPECS] * len(layers), P()), P()))

    def lower() -> None:
        fresh().lower(layers, problem.x, problem.cotangent)

    def first() -> None:
        fresh()(layers, problem.x, problem.cotangent)

    return _median(bare, repeats), _median(lower, repeats), _median(first, repeats)


def _faked(tree: Any, mode: FakeTensorMode) -> Any:
    return optree.tree_map(mode.from_tensor, tree)


def _median(run: Callable[[], None], repeats: int) -> float:
    run()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def calls(mesh: Mesh) -> dict[str, tuple[dict[int, float], float, float]]:
    """The overhead of a cached call without gradients, by number of leaves, and its fit a + b·leaves.

    The function does next to nothing with its leaves, and its own time is subtracted.
    """
    axis = mesh.axes[0]

    def one_out(leaves: Sequence[Tensor]) -> Tensor:
        return leaves[0] * 2

    def all_out(leaves: Sequence[Tensor]) -> list[Tensor]:
        return [leaf * 2 for leaf in leaves]

    cases = {
        "placed in, one out": (one_out, P(axis), P(axis)),
        "plain in, one out": (one_out, None, P()),
        "placed in, all out": (all_out, P(axis), P(axis)),
    }
    overheads = {}
    with torch.no_grad():
        for name, (fn, spec, out) in cases.items():
            points = {n: _overhead(fn, n, spec, out, mesh) for n in LEAVES}
            overheads[name] = (points, *_line(points))
    return overheads


def _overhead(fn: Any, count: int, spec: P | None, out: P, mesh: Mesh) -> float:
    whole = [torch.ones(8) for _ in range(count)]
    run = shard(fn, mesh, out_specs=out)
    args = whole if spec is None else place(whole, mesh, spec)
    bare = whole if spec is None else [x.chunk(mesh.size)[0].clone() for x in whole]
    return per_call(lambda: run(args)) - per_call(lambda: fn(bare))


def comparing(mesh: Mesh) -> tuple[float, float]:
    """The seconds of the ranks' check of a call, and of the smallest all_reduce for comparison."""
    x = place(torch.ones(mesh.size), mesh, P(mesh.axes[0]))
    program = shard(lambda x: x.sum(), mesh).lower(x)
    order = CallOrder(mesh, program, program.runtime.graph(program).graph, "x")
    number, group = torch.ones(1), mesh.group(mesh.axes)
    return together(order.compare), together(lambda: dist.all_reduce(number, group=group))


def storing(repeats: int = 5) -> tuple[float, float, float]:
    """The median seconds to save a value, to load it, and to compute the checksum that both need."""
    value = torch.rand(STORED // 4)

    def seconds(path: Path) -> tuple[float, float, float]:
        ticks = [time.perf_counter()]
        save(path, [value])
        ticks.append(time.perf_counter())
        load(path, [value])
        ticks.append(time.perf_counter())
        with open(next(path.glob("*.distcp")), "rb") as file:
            checksum_of(file, 0, STORED)
        ticks.append(time.perf_counter())
        saving, loading, checksum = (b - a for a, b in itertools.pairwise(ticks))
        return saving, loading, checksum

    with tempfile.TemporaryDirectory() as folder:
        rows = [seconds(Path(folder, str(i))) for i in range(repeats)]
    saving, loading, checksum = (statistics.median(times) for times in zip(*rows, strict=True))
    return saving, loading, checksum


def _line(points: dict[int, float]) -> tuple[float, float]:
    """The line of least squares of relative errors: every number of leaves has the same weight."""
    n = torch.tensor(list(points), dtype=torch.float64)
    y = torch.tensor(list(points.values()), dtype=torch.float64)
    rows = torch.stack([1 / y, n / y], 1)
    a, b = torch.linalg.lstsq(rows, torch.ones_like(y)[:, None]).solution.flatten().tolist()
    return a, b
