"""A training step of Llama 3 405B planned for 4,096 ranks, without a budget of memory and with one.

The step is forward, backward and AdamW in bfloat16, for 512 sequences of 8,192 tokens, on a mesh of
dp 8 × fsdp 64 × tp 8, with sequence parallelism; its 126 layers are one `repeat`. Nothing is allocated,
and one process plans for all ranks. Peaks are of one rank, simulated: parameters, gradients and optimizer
state, the layers that are gathered, and what the backward needs.

    python benchmarks/llama_405b.py
    python benchmarks/llama_405b.py --layers 8 --gigabytes 20
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchard import Mesh, P, checkpoint, optim, place, policies, shard, stack
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import LOOP, RECOMPUTE
from torchard.functional.torch_internals import FakeTensorMode

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import llama

RANKS = {"dp": 8, "fsdp": 64, "tp": 8}
_, UPDATE = optim.adamw(3e-4)


def step(loss: Callable[..., Any], params: Any, state: Any, tokens: Any, targets: Any) -> Any:
    grads, value = torch.func.grad_and_value(loss)(params, tokens, targets)
    params, state = UPDATE(grads, state, params)
    return params, state, value


def planned(shapes: llama.Shapes, wrapped: Callable[[Any], Any]) -> tuple[Any, float]:
    """The program of the step, whose loss is wrapped in a transform, and the seconds of planning it."""

    def stacked(make: Callable[..., Any]) -> Any:
        params = llama.parameters(replace(shapes, layers=1), make)
        rows = {k: make(shapes.layers, *leaf.shape) for k, leaf in params["layers"][0].items()}
        return {**params, "layers": rows}

    specs = llama.specs(replace(shapes, layers=1))
    specs = {**specs, "layers": stack(specs["layers"])}
    held = optim.AdamState(P(), specs, specs)
    mesh = Mesh(RANKS, virtual=True)
    with FakeTensorMode():
        params = stacked(functools.partial(torch.empty, dtype=torch.bfloat16))
        tokens = place(torch.empty(512, shapes.context, dtype=torch.int64), mesh, llama.BATCH)
        args = place((params, optim.AdamState(torch.tensor(0), params, params)), mesh, (specs, held))
    loss = wrapped(functools.partial(llama.loss, shapes))
    run = shard(functools.partial(step, loss), mesh, out_specs=(specs, held, P()))
    began = time.perf_counter()
    return run.lower(*args, tokens, tokens), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=llama.LLAMA_405B.layers)
    parser.add_argument("--gigabytes", type=float, default=64, help="the budget of a rank, 1e9 bytes")
    options = parser.parse_args()
    shapes = replace(llama.LLAMA_405B, layers=options.layers)
    budget = policies.budget(bytes=int(options.gigabytes * 1e9))
    ways: dict[str, Callable[[Any], Any]] = {
        "no budget": lambda loss: loss,
        f"budget of {options.gigabytes:g} GB": lambda loss: checkpoint(loss, policy=budget),
    }
    print(f"Llama 3 405B, {options.layers} layers, 4,096 ranks; bytes and FLOPs of one rank")
    for name, wrapped in ways.items():
        program, seconds = planned(shapes, wrapped)
        crossing = sum(record.bytes for record in program.collectives)
        again = sum(times(node) for node in program.calls if RECOMPUTE.get(node))
        loops = {LOOP.of(node) for node in program.calls if LOOP.on(node)}
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(
            f"{name:18}{seconds:6.1f} s, {resident:,.0f} MiB resident; {len(program.calls):,} "
            f"operations, {len(loops)} loops; peak {program.peak / 1e9:,.1f} GB, sent "
            f"{crossing / 1e9:,.0f} GB, {again:,} operations recomputed",
            flush=True,
        )


if __name__ == "__main__":
    main()
