"""The time of planning: the training step of a GPT-2, traced and planned for meshes of two sizes.

Nothing is run on the meshes, and no weights are allocated: planning needs shapes only.

    python benchmarks/planning.py            GPT-2 small at 12 and at 24 layers
    python benchmarks/planning.py --quick    a small model
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchard import Mesh, P, ShapeDtype, optim, random, shard, trace
from torchard.functional.torch_internals import FakeTensorMode

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

__all__ = ["measure"]

GPT2 = train_gpt.Size(context=1024, width=768, heads=12, layers=12)
TINY = train_gpt.Size(context=32, width=64, heads=4, layers=2)
MESHES = ({"dp": 2, "tp": 2}, {"dp": 64, "tp": 64})
_, UPDATE = optim.adamw(3e-4)


def step(size: train_gpt.Size, params: Any, state: Any, batch: Tensor) -> Any:
    """A training step: forward, backward and AdamW."""
    grads, loss = torch.func.grad_and_value(functools.partial(train_gpt.loss, size))(params, batch)
    params, state = UPDATE(grads, state, params)
    return params, state, loss


def fakes(size: train_gpt.Size, mode: FakeTensorMode) -> tuple[Any, Any, Tensor]:
    """The arguments of the step as fake tensors."""
    init, _ = optim.adamw(3e-4)
    with mode:
        params = train_gpt.init(size, random.key(0))
        return params, init(params), torch.zeros(128, size.context + 1, dtype=torch.int64)


def bare(size: train_gpt.Size) -> int:
    """Trace the step by make_fx alone; the number of nodes in its graph."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args = fakes(size, mode)
    with mode:
        graph = make_fx(functools.partial(step, size))(*args).graph
    return len(graph.nodes)


def shapes(size: train_gpt.Size) -> tuple[Any, Any, Any]:
    args: Any = optree.tree_map(
        lambda x: ShapeDtype(tuple(x.shape), x.dtype), fakes(size, FakeTensorMode())
    )
    return args


def planned(size: train_gpt.Size, mesh: dict[str, int], args: Any) -> str:
    """Trace and plan the step for a mesh; the last line of the table of collectives."""
    specs = train_gpt.megatron(size)
    state = optim.AdamState(P(), specs, specs)
    run = shard(
        functools.partial(step, size),
        Mesh(mesh, virtual=True),
        in_specs=(specs, state, P("dp")),
        out_specs=(specs, state, P()),
    )
    return str(run.lower(*args).collectives).splitlines()[-1]


def traced(size: train_gpt.Size, args: Any) -> None:
    trace(functools.partial(step, size))(*args)


def aot_eager(size: train_gpt.Size) -> float:
    """The seconds in which torch.compile captures the loss and its gradient: a first call less a second.

    The batch is one short row, so that the computation itself takes little time. The optimizer is left
    out, since torch would capture it separately.
    """
    params = train_gpt.init(size, random.key(0))
    leaves, structure = optree.tree_flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    batch = torch.zeros(1, 9, dtype=torch.int64)

    def loss(leaves: list[Tensor]) -> Tensor:
        return train_gpt.loss(size, optree.tree_unflatten(structure, leaves), batch)

    torch.compiler.reset()
    run = torch.compile(loss, backend="aot_eager")
    first, second = (seconds(lambda: torch.autograd.grad(run(leaves), leaves)) for _ in range(2))
    return first - second


def seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(size: train_gpt.Size, repeats: int) -> dict[str, float]:
    """The median seconds of make_fx, of tracing and of planning, taken in turns."""
    args = shapes(size)
    runs: dict[str, Callable[[], Any]] = {
        "make_fx alone": lambda: bare(size),
        "trace": lambda: traced(size, args),
        **{
            f"trace + plan {mesh['dp']} x {mesh['tp']}": functools.partial(planned, size, mesh, args)
            for mesh in MESHES
        },
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            took[name].append(seconds(run))
    return {name: statistics.median(times) for name, times in took.items()}


def report(size: train_gpt.Size, repeats: int) -> str:
    """The table: seconds, their ratio to make_fx alone, and the ratio of a deeper model to this one."""
    deeper = replace(size, layers=2 * size.layers)
    few, many = measure(size, repeats), measure(deeper, repeats)
    lines = [
        f"a training step of a GPT, width {size.width}: forward, backward, AdamW; "
        f"{bare(size)} and {bare(deeper)} nodes",
        f"{'seconds (x make_fx)':24}{size.layers:>8} layers{deeper.layers:>14} layers       ratio",
    ]
    for name in few:
        cells = [
            f"{times[name]:8.2f} ({times[name] / times['make_fx alone']:4.2f})"
            for times in (few, many)
        ]
        lines.append(f"{name:24}{cells[0]:>15}{cells[1]:>21}{many[name] / few[name]:12.2f}")
    wide, narrow = (few[name] for name in reversed(list(few)[-2:]))
    lines.append(f"4,096 ranks take {wide / narrow:.2f} x the time of 4")
    lines.append(f"torch.compile(backend='aot_eager'), loss and gradients: {aot_eager(size):.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(TINY, 1)  # imports and caches
    text = report(TINY, 1) if options.quick else report(GPT2, 3)
    print(text)


if __name__ == "__main__":
    main()
