"""Peaks of one rank of a group that does not exist: what programs say, and what is measured.

    python rank_peaks.py RANK SEEDS

prints, by case, the peak by the program and the most bytes that are alive while the rank runs, as JSON.
Programs are read for the rank that holds most, which is the first one; other ranks run pipelines alone.
The last cases are random programs, of that many seeds, and half as many that write in place. As under
NCCL or gloo, what a collective reads and writes is held until it is awaited: torch's fake group is done
at once, so `HoldingLiveBytes` holds it.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from paths import EXAMPLES

warnings.simplefilter("ignore")
sys.path.append(str(EXAMPLES))

import optree  # noqa: E402
import pipelined  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402
import write_cases  # noqa: E402
import write_checks  # noqa: E402
import write_peaks  # noqa: E402
from _live import LiveBytes  # noqa: E402
from live_bytes import parts  # noqa: E402
from refusals import refuses  # noqa: E402
from sharded_programs import numbered  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import torchard.sharding.lowering.plan_consistency as agree  # noqa: E402
from torchard import (  # noqa: E402
    Mesh,
    MeshTensor,
    P,
    Schedule,
    checkpoint,
    jit,
    pipeline,
    place,
    policies,
    random,
    repeat,
    shard,
    stage_specs,
)
from torchard.functional.programs.program import Program  # noqa: E402
from torchard.functional.remat.liveness import liveness_of_ranks  # noqa: E402
from torchard.functional.torch_internals import storage_id  # noqa: E402

WORLD = 4
SIZE = train_gpt.Size(context=8, width=16, heads=4, layers=2)
LOSS = functools.partial(train_gpt.loss, SIZE)
HALF = functools.partial(checkpoint, policy=policies.budget(fraction=0.5), where="block/*")


class Case(NamedTuple):
    """A program, a call of it, and the tensors that this rank has before."""

    program: Program
    call: Callable[[], Any]
    held: list[torch.Tensor]


class HoldingLiveBytes(LiveBytes):
    """Holds what collectives use until they are awaited."""

    def __init__(self, already: Any = ()) -> None:
        super().__init__(already)
        self.under_way: dict[int, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.under_way.pop(storage_id(args[0]), None)
        elif func.namespace == "_c10d_functional":
            self.under_way[storage_id(out)] += [*args, out]
        return out


def of(fn: Any, *args: Any) -> Case:
    """A call of a function."""
    run = jit(fn, backend="eager")
    return Case(run.lower(*args), lambda: run(*args), parts(args))


def model(mesh: Mesh, spec: Any, batch: P) -> tuple[Any, Any]:
    """Parameters, and rows of data."""
    rows = torch.zeros(8, SIZE.context + 1, dtype=torch.int64)
    return place(train_gpt.init(SIZE, random.key(0)), mesh, spec), place(rows, mesh, batch)


def tensor_parallel() -> Case:
    """The gradient of a loss, with Megatron's layouts."""
    mesh, specs = Mesh({"tp": WORLD}), train_gpt.megatron(SIZE)
    return of(shard(torch.func.grad(LOSS), mesh, out_specs=specs), *model(mesh, specs, P()))


def fully_sharded(prefetch: int, loss: Any = LOSS) -> Case:
    """The gradient of a loss, with gathered parameters."""
    mesh, spec, how = Mesh({"a": WORLD}), P("a"), Schedule(prefetch=prefetch)
    run = shard(torch.func.grad(loss), mesh, out_specs=spec, schedule=how)
    return of(run, *model(mesh, spec, spec))


def outside(loss: Any) -> Case:
    """The same, where autograd takes the gradient."""
    mesh, one = Mesh({"a": WORLD}), torch.ones(())
    params, rows = model(mesh, P("a"), P("a"))
    leaves, tree = optree.tree_flatten(params, is_leaf=lambda value: isinstance(value, MeshTensor))
    leaves, run = [leaf.requires_grad_() for leaf in leaves], shard(loss, mesh)

    def both() -> Any:
        total = run(optree.tree_unflatten(tree, leaves), rows)  # which a caller holds
        return torch.autograd.grad(total, leaves, one)

    return Case(run.lower_joint(params, rows, argnums=0), both, parts(leaves, rows, one))


def looped(order: int, spec: P) -> Case:
    """Derivatives of a loop over stacked layers."""
    mesh = Mesh({"a": WORLD})

    def loss(ws: Any, x: Any) -> Any:
        return repeat(lambda w, x: torch.tanh(x @ w) + x, ws, x).square().mean()

    def slope(ws: Any, x: Any) -> Any:
        return torch.func.grad(loss)(ws, x).sin().sum()

    run = shard(torch.func.grad(loss if order == 1 else slope), mesh, out_specs=spec)
    return of(run, place(torch.ones(5, 16, 16), mesh, spec), place(torch.ones(8, 16), mesh, P("a")))


def exchanged() -> Case:
    """Rows become columns, unevenly."""
    mesh = Mesh({"a": WORLD})
    run = shard(lambda x: x.sin().softmax(0), mesh, out_specs=P("a"))
    return of(run, place(torch.ones(9, 10), mesh, P("a")))


def staged(schedule: str) -> Case:
    """A pipeline, of which this rank has a stage."""
    case, mesh = pipelined.model("mlp", 8), Mesh({"pp": WORLD})
    how: Any = {"stages": case.layers, "microbatches": 4, "batch": (None, 0, 0), "schedule": schedule}
    step = pipeline(torch.func.grad_and_value(case.loss), mesh, "pp", **how)
    params = place(case.args[0], mesh, stage_specs(step, *case.args))
    return of(step, params, *place(case.args[1:], mesh, P()))


def drawn(seed: int) -> Case:
    """A random program."""
    mesh = Mesh(Random(seed).choice([{"a": 4}, {"a": 2, "b": 2}]))
    case = numbered(seed, mesh, steps=6)
    args = place(case.program.inputs, mesh, case.in_specs)
    return of(shard(case.program, mesh, out_specs=case.out_specs), *args)


def writing(count: int) -> dict[str, tuple[int, int]]:
    """The peaks of random programs that write in place, by case; those that are refused are left out.

    `where` of a number makes a tensor of it while it runs, of at most 8 bytes: memory within an operator
    is no value of the program, and is not measured.
    """
    write_cases.MESHES.update({"dp=2": Mesh({"dp": 4}), "dp=2 tp=2": Mesh({"dp": 2, "tp": 2})})
    found = {}
    strategy = write_peaks.peak_cases(*write_cases.MESHES)
    for case in write_cases.drawn(count, 0, strategy):
        try:
            said, have = write_peaks.said_and_measured(case, HoldingLiveBytes)
        except Exception as error:
            if not refuses(error) and not write_checks.torch_refuses(case, type(error)):
                raise
        else:
            within = have["peak"] - said["peak"] in range(9)
            found[str(case)] = said["peak"], said["peak"] if within else have["peak"]
    return found


def cases(seeds: int) -> dict[str, Callable[[], Case]]:
    bind = functools.partial
    return {
        "tensor parallel": tensor_parallel,
        **{f"fully sharded, {n} ahead": bind(fully_sharded, n) for n in (0, 1, 2)},
        "fully sharded, budget": bind(fully_sharded, 1, HALF(LOSS)),
        "outside": bind(outside, LOSS),
        "outside, checkpoint": bind(outside, checkpoint(LOSS, where="block/*")),
        **{f"loop, {n}, {s}": bind(looped, n, s) for n in (1, 2) for s in (P(None, "a"), P())},
        "exchanged": exchanged,
        **{f"seed {seed}": bind(drawn, seed) for seed in range(seeds)},
    }


PIPELINES = {each: functools.partial(staged, each) for each in ("gpipe", "1f1b", "zb-h1")}


def measured(case: Case) -> tuple[int, int]:
    """What a program says, of a pipeline for this rank, and what a second call has."""
    lives = liveness_of_ranks(case.program)
    said = lives[min(dist.get_rank(), len(lives) - 1)].peak
    case.call()
    gc.collect()
    with HoldingLiveBytes(case.held) as live:
        case.call()
    return said, live.peak()


def main(rank: int, seeds: int) -> None:
    def alone(mesh: Mesh, what: str, mine: Any, *_: Any, **__: Any) -> list[Any]:
        return [mine] * WORLD

    torch.set_num_threads(1)
    agree.exchange = alone
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    chosen = (cases(seeds) if rank == 0 else {}) | PIPELINES
    found = {name: measured(case()) for name, case in chosen.items()}
    found |= writing(seeds // 2) if rank == 0 else {}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
