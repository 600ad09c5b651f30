"""The time of planning by depth: a GPT's training step as a Python loop over layers, and with `repeat`.

Nothing is run on the meshes, and no weights are allocated: planning needs shapes only. A Python loop is
traced layer by layer; its equal layers are planned, matched and compiled once.

    python benchmarks/depth.py                    trace and plan, and fuse
    python benchmarks/depth.py --budget           a budget of peak memory, half way from the least, too
    python benchmarks/depth.py --compile          the first call of the compiled step of a small GPT, too
    python benchmarks/depth.py --steady           steps of 12 layers with loops beside steps without
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

from torchard import (
    Mesh,
    P,
    checkpoint,
    fuse,
    jit,
    name,
    nn,
    optim,
    place,
    policies,
    random,
    repeat,
    scope,
    shard,
    stack,
)
from torchard.functional.loops import equal_layers
from torchard.functional.torch_internals import FakeTensorMode

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

GPT2 = train_gpt.Size(context=1024, width=768, heads=12, layers=12)
TINY = train_gpt.Size(context=32, width=64, heads=4, layers=2)
PLANS = {"fully sharded over 8": {"dp": 8}, "2 x 2 tensor parallel": {"dp": 2, "tp": 2}}
INIT, UPDATE = optim.adamw(3e-4)


def repeated(size: train_gpt.Size, params: Any, batch: Tensor) -> Tensor:
    """The loss of examples/train_gpt.py, with stacked blocks."""

    def block(p: Any, x: Tensor) -> Tensor:
        x = name(x + train_gpt.attention(size, p, train_gpt.norm(p["norm1"], x)), "stream")
        return name(x + train_gpt.mlp(p, train_gpt.norm(p["norm2"], x)), "stream")

    context = batch[:, :-1]
    with scope("embedding"):
        x = nn.embedding(params["embedding"], context) + params["positions"][: context.shape[1]]
    x = repeat(block, params["blocks"], name(x, "stream"))
    with scope("head"):
        scores = nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])
    with scope("loss"):
        return nn.cross_entropy(scores, batch[:, 1:])


LOSSES = {"loop": train_gpt.loss, "repeat": repeated}


def step(loss: Callable[..., Tensor], params: Any, state: Any, batch: Tensor) -> Any:
    """A training step: forward, backward and AdamW."""
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    params, state = UPDATE(grads, state, params)
    return params, state, value


def arguments(size: train_gpt.Size, way: str, on: torch.device | str = "meta") -> tuple[Any, Any, Tensor]:
    with FakeTensorMode() if on == "meta" else torch.device(on):
        params = train_gpt.init(size, random.key(0))
        params = {**params, "blocks": stack(params["blocks"])} if way == "repeat" else params
        args: Any = params, INIT(params), torch.zeros(16, size.context + 1, dtype=torch.int64)
    if on == "meta":
        args = optree.tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), args)
    return args


def specs(size: train_gpt.Size, way: str, axes: dict[str, int]) -> Any:
    by_name = train_gpt.megatron(size)
    if "tp" not in axes:
        by_name = optree.tree_map(lambda _: P("dp"), by_name)
    return {**by_name, "blocks": stack(by_name["blocks"])} if way == "repeat" else by_name


def seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def planned(size: train_gpt.Size, way: str, axes: dict[str, int]) -> float:
    """The seconds in which the step is traced and planned for a mesh."""
    mesh, by_name = Mesh(axes, virtual=True), specs(size, way, axes)
    params, state, batch = arguments(size, way)
    held = optim.AdamState(state.step, *(place(m, mesh, by_name) for m in state[1:]))
    fn = functools.partial(step, functools.partial(LOSSES[way], size))
    out = by_name, optim.AdamState(P(), by_name, by_name), P()
    run = shard(fn, mesh, out_specs=out)
    args = place(params, mesh, by_name), held, place(batch, mesh, P("dp"))
    return seconds(lambda: run.lower(*args))


def fused(size: train_gpt.Size, way: str) -> float:
    params, _, batch = arguments(size, way)
    run = fuse(torch.func.grad(functools.partial(LOSSES[way], size)))
    return seconds(lambda: run.lower(params, batch))


def budgeted(size: train_gpt.Size, way: str) -> float:
    """The seconds in which the gradient is traced, and what it keeps within a budget is chosen."""
    params, _, batch = arguments(size, way)
    loss = checkpoint(functools.partial(LOSSES[way], size), policy=policies.budget(fraction=0.5))
    run = jit(lambda params, batch: torch.func.grad(loss)(params, batch))
    return seconds(lambda: run.lower(params, batch))


def compiled(size: train_gpt.Size, way: str) -> float:
    """The seconds of a first call of the compiled step."""
    args = arguments(size, way, "cpu")
    run = jit(functools.partial(step, functools.partial(LOSSES[way], size)))
    return seconds(lambda: run(*args))


def steady(size: train_gpt.Size, backend: str, rounds: int = 20) -> str:
    """Steps of the list of layers with loops and without, in turns: medians, and their ratio."""
    args, runs = arguments(size, "loop", "cpu"), {}
    for least in (equal_layers.LEAST, sys.maxsize):
        equal_layers.LEAST, kept = least, equal_layers.LEAST
        fn = functools.partial(step, functools.partial(LOSSES["loop"], size))
        runs[least] = jit(fn, backend=backend)
        runs[least](*args)
        equal_layers.LEAST = kept
    times: dict[int, list[float]] = {least: [] for least in runs}
    for _ in range(rounds):
        for least, run in runs.items():
            times[least].append(seconds(lambda run=run: run(*args)))
    rolled, unrolled = map(statistics.median, times.values())
    both = f"{rolled * 1e3:9.1f} ms with loops {unrolled * 1e3:9.1f} without"
    return f"{backend:10} {both} {unrolled / rolled:8.3f}"


def row(what: str, way: str, of: Callable[[int], float], depths: list[int]) -> str:
    times = {depth: of(depth) for depth in depths}
    ratio = f"{times[96] / times[12]:8.2f}" if {12, 96} <= times.keys() else f"{'':8}"
    return f"{what:38}{way:8}" + "".join(f"{t:10.2f}" for t in times.values()) + f"{ratio:>12}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="measure first calls of the compiled step")
    parser.add_argument("--budget", action="store_true", help="measure budgets of peak memory, too")
    parser.add_argument("--loop", type=int, nargs="*", default=[6, 12], help="depths of the Python loop")
    parser.add_argument("--repeat", type=int, nargs="*", default=[6, 12, 48, 96], help="depths of repeat")
    parser.add_argument("--steady", action="store_true", help="compare steps with loops and without")
    given = parser.parse_args()
    if given.steady:
        for width in (64, 256):
            size = replace(TINY, layers=12, width=width)
            for backend in ("eager", "inductor"):
                print(f"width {width:4}  {steady(size, backend)}", flush=True)
        return
    depths = {"loop": given.loop, "repeat": given.repeat}
    print(f"seconds, GPT of width {GPT2.width}; depths {depths}; last the ratio of 96 to 12 layers")
    fused(replace(TINY, layers=2), "loop")  # derives the kernels' gradients, once in a process
    for way, counts in depths.items():
        for label, axes in PLANS.items():
            of = lambda n, way=way, axes=axes: planned(replace(GPT2, layers=n), way, axes)  # noqa: E731
            print(row(f"trace + plan, {label}", way, of, counts), flush=True)
        of = lambda n, way=way: fused(replace(GPT2, layers=n), way)  # noqa: E731
        print(row("fuse", way, of, counts), flush=True)
        if given.budget:
            of = lambda n, way=way: budgeted(replace(GPT2, layers=n), way)  # noqa: E731
            print(row("budget", way, of, counts), flush=True)
        if given.compile:
            of = lambda n, way=way: compiled(replace(TINY, layers=n), way)  # noqa: E731
            print(row("first call, compiled, width 64", way, of, counts), flush=True)


if __name__ == "__main__":
    main()
