"""What torchard costs besides the work: tracing and planning once, and then every call."""

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
    """Seconds for make_fx alone, for trace and plan, and for the first call; medians."""
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
    """Overhead of a cached call without gradients by number of leaves, and its line a + b·leaves.

    The function does next to nothing with its leaves, and what it costs by itself is taken off.
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
    found = {}
    with torch.no_grad():
        for name, (fn, spec, out) in cases.items():
            points = {n: _overhead(fn, n, spec, out, mesh) for n in LEAVES}
            found[name] = (points, *_line(points))
    return found


def _overhead(fn: Any, count: int, spec: P | None, out: P, mesh: Mesh) -> float:
    whole = [torch.ones(8) for _ in range(count)]
    run = shard(fn, mesh, out_specs=out)
    args = whole if spec is None else place(whole, mesh, spec)
    bare = whole if spec is None else [x.chunk(mesh.size)[0].clone() for x in whole]
    return per_call(lambda: run(args)) - per_call(lambda: fn(bare))


def comparing(mesh: Mesh) -> tuple[float, float]:
    """Seconds in which ranks compare a call, and of the smallest all_reduce that it can come before."""
    x = place(torch.ones(mesh.size), mesh, P(mesh.axes[0]))
    program = shard(lambda x: x.sum(), mesh).lower(x)
    order = CallOrder(mesh, program, program.runtime.graph(program).graph, "x")
    one, group = torch.ones(1), mesh.group(mesh.axes)
    return together(order.compare), together(lambda: dist.all_reduce(one, group=group))


def storing(repeats: int = 5) -> tuple[float, float, float]:
    """Seconds to save one value, to load it, and for its checksum, of which both need one; medians."""
    value = torch.rand(STORED // 4)

    def each(path: Path) -> tuple[float, float, float]:
        ticks = [time.perf_counter()]
        save(path, [value])
        ticks.append(time.perf_counter())
        load(path, [value])
        ticks.append(time.perf_counter())
        with open(next(path.glob("*.distcp")), "rb") as file:
            checksum_of(file, 0, STORED)
        ticks.append(time.perf_counter())
        return tuple(b - a for a, b in itertools.pairwise(ticks))  # type: ignore[return-value]  # of three

    with tempfile.TemporaryDirectory() as folder:
        found = [each(Path(folder, str(i))) for i in range(repeats)]
    a, b, c = (statistics.median(times) for times in zip(*found, strict=True))
    return a, b, c


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares of relative errors: every number of leaves counts alike."""
    n = torch.tensor(list(points), dtype=torch.float64)
    y = torch.tensor(list(points.values()), dtype=torch.float64)
    rows = torch.stack([1 / y, n / y], 1)
    a, b = torch.linalg.lstsq(rows, torch.ones_like(y)[:, None]).solution.flatten().tolist()
    return a, b
