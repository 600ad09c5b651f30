"""Jobs of a few ranks of which one comes to grief in the middle of a step: what the other one says.

Run as a script, so that each job can be forked from a process that has torch loaded; prints what rank 0
of each job raised, as JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from progress import Own, Watch
from torch.utils._python_dispatch import TorchDispatchMode

from torchard import (
    CollectiveError,
    Mesh,
    P,
    jit,
    nn,
    pipeline,
    place,
    psum,
    scope,
    shard,
    shard_map,
)
from torchard.sharding.lowering import direct_sends

# Seconds that a process group waits for a rank that is silent.
TIMEOUT = 8.0
# Seconds in which no job gets on: then those that have not ended never will.
PATIENCE = 60.0

Params = dict[str, torch.Tensor]
AXES = {"one": 1, "tp": 2}
# Of other jobs.
MORE = {"pipelined": {"pp": 2}, "along_one_axis": {"dp": 2, "tp": 2}, "along_two_axes": {"dp": 2, **AXES}}
JOBS: dict[str, Callable[[int, Mesh], Any]] = {}


class Ends(TorchDispatchMode):
    """The process ends, or stops, where it would begin the n-th collective."""

    def __init__(self, number: int, how: signal.Signals) -> None:
        super().__init__()
        self.left, self.how = number, how

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.__name__:
            if not self.left:
                os.kill(os.getpid(), self.how)
            self.left -= 1
        return func(*args, **(kwargs or {}))


def told(run: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises, and after how many seconds at least."""
    began = time.monotonic()
    try:
        run()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "collective": str(error.collective) if isinstance(error, CollectiveError) else None,
            "seconds": time.monotonic() - began,
        }
    return {"type": "no error"}


# -- a step with several collectives ----------------------------------------------------------------

SPECS = {"up": P("tp", None), "down": P(None, "tp")}


def block(p: Params, x: torch.Tensor) -> torch.Tensor:
    return nn.linear(nn.gelu(nn.linear(x, p["up"])), p["down"])


def model(params: list[Params], x: torch.Tensor) -> torch.Tensor:
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = block(p, x)
    return x.square().sum()


def step(params: list[Params], x: torch.Tensor) -> Any:
    return torch.func.grad(model, argnums=(0, 1))(params, x)


def arguments(mesh: Mesh) -> Any:
    params = [{"up": torch.full((6, 4), 0.1), "down": torch.full((4, 6), 0.2)} for _ in range(2)]
    return place(params, mesh, [SPECS] * 2), torch.ones(3, 4)


def sharded(mesh: Mesh) -> Any:
    return shard(step, mesh, out_specs=([SPECS] * 2, P()))


def at(number: int, how: signal.Signals) -> Callable[[int, Mesh], Any]:
    """The second step; rank 1 does not come to the n-th collective of it."""

    def job(rank: int, mesh: Mesh) -> Any:
        run, given = sharded(mesh), arguments(mesh)
        plan = run.lower(*given).collectives
        run(*given)
        met(rank, 2)
        if rank:
            with Ends(number, how):
                run(*given)
        return {**told(lambda: run(*given)), "plan": [[c.title, c.payload, str(c)] for c in plan]}

    return job


def met(rank: int, ranks: int) -> None:
    """Every rank has come this far: nobody's last bytes are lost with a process that ends next."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"met/{rank}", "")
    store.wait([f"met/{other}" for other in range(ranks)])


# One after another they name every collective of the plan.
for number in range(4):
    JOBS[f"stopped at {number}"] = at(number, signal.SIGSTOP)
JOBS["killed"] = at(0, signal.SIGKILL)


def job(fn: Callable[[int, Mesh], Any]) -> Callable[[int, Mesh], Any]:
    JOBS[fn.__name__] = fn
    return fn


def left_alone(rank: int, run: Callable[[], Any]) -> Any:
    """What rank 0 is told if rank 1 stops where it should run this once more."""
    run()
    met(rank, dist.get_world_size())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told(run)


@job
def backward(rank: int, mesh: Mesh) -> Any:
    """Rank 1 stops between the forward and the backward of autograd."""
    run = shard(model, mesh)
    params, x = arguments(mesh)

    def forward() -> torch.Tensor:
        loss: torch.Tensor = run(params, x.requires_grad_())
        return loss

    forward().backward()
    loss = forward()
    met(rank, 2)
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told(loss.backward)


@job
def merged(rank: int, mesh: Mesh) -> Any:
    """All gradients of a replicated model travel as one."""
    params = [{"up": torch.full((6, 4), 0.1), "down": torch.full((4, 6), 0.2)} for _ in range(2)]
    x = place(torch.ones(4, 4), mesh, P("tp"))
    run = shard(torch.func.grad(model), mesh, out_specs=P())
    return left_alone(rank, lambda: run(params, x))


@job
def neighbours(rank: int, mesh: Mesh) -> Any:
    """A roll fetches its neighbour's elements."""
    x = place(torch.arange(6.0), mesh, P("tp"))

    def rolled(x: torch.Tensor) -> torch.Tensor:
        with scope("ring"):
            return x.roll(1, 0) + x

    run = shard(rolled, mesh, out_specs=P("tp"))
    return left_alone(rank, lambda: run(x))


@job
def manual(rank: int, mesh: Mesh) -> Any:
    """A collective of the user's own."""
    run = shard_map(lambda x: psum(x, "tp"), mesh, P("tp"), P())
    return left_alone(rank, lambda: run(torch.arange(6.0)))


@job
def along_one_axis(rank: int, mesh: Mesh) -> Any:
    """The process group of an axis waits as long as that of all ranks."""
    run = shard_map(lambda x: psum(x, "tp"), mesh, P("tp"), P())
    return left_alone(rank, lambda: run(torch.arange(6.0)))


@job
def along_two_axes(rank: int, mesh: Mesh) -> Any:
    """So does that of a product of axes."""
    run = shard_map(lambda x: psum(x, ("one", "tp")), mesh, P(("one", "tp")), P())
    return left_alone(rank, lambda: run(torch.arange(6.0)))


@job
def placing(rank: int, mesh: Mesh) -> Any:
    """To meet, too, ranks wait as long as in a collective, unless the mesh says otherwise."""
    mesh = Mesh(AXES)
    return left_alone(rank, lambda: place(torch.ones(4), mesh, P("tp")))


@job
def pipelined(rank: int, mesh: Mesh) -> Any:
    """The last stage stops where it should send back the gradient of the second microbatch."""
    params, _ = arguments(Mesh(AXES, virtual=True))
    params = [{name: value.full() for name, value in p.items()} for p in params]
    step = pipeline(torch.func.grad(model), mesh, "pp", microbatches=2, batch=(None, 0))
    step(params, torch.ones(6, 4))
    met(rank, 2)
    if rank:
        backend, left = direct_sends._backend, iter(range(4))

        def stops(*given: Any) -> Any:
            if next(left) == 3:  # after two receives, and a send
                os.kill(os.getpid(), signal.SIGSTOP)
            return backend(*given)

        direct_sends._backend = stops
    return told(lambda: step(params, torch.ones(6, 4)))


@job
def compiled(rank: int, mesh: Mesh) -> Any:
    """Of a program that a compiler made only a list is known; rank 1 comes, and stops in the middle."""
    run, given = jit(sharded(mesh), backend="aot_eager"), arguments(mesh)
    run(*given)
    met(rank, 2)
    if rank:
        with Ends(1, signal.SIGSTOP):
            run(*given)
    return told(lambda: run(*given))


# -- running them -----------------------------------------------------------------------------------


def rank_of(name: str, rank: int, folder: str, out: int) -> None:
    """One process of a job; rank 0 writes what it was told to a pipe."""
    if rank:
        os.close(out)  # or the pipe would stay open while it is stopped
    axes = MORE.get(name, AXES)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name.replace(' ', '-')}",
        rank=rank,
        world_size=math.prod(axes.values()),
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    found = JOBS[name](rank, Mesh(axes, timeout=PATIENCE))
    if rank == 0:
        os.write(out, json.dumps(found).encode())


def forked(run: Callable[[], None]) -> int:
    """Run this in a process of its own, which ends with it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def end_if_nothing_gets_on() -> None:
    """Raise TimeoutError, later: processes that are stopped, or wait for those, compute nothing."""
    watch = Watch(PATIENCE, Own(), busy=math.inf)

    def look(*_: Any) -> None:
        if watch.hangs():
            raise TimeoutError

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE / 10, PATIENCE / 10)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    reading, pids = {}, []
    for name in JOBS:
        reading[name], out = os.pipe()
        for rank in range(math.prod(MORE.get(name, AXES).values())):
            pids.append(forked(functools.partial(rank_of, name, rank, folder, out)))
        os.close(out)
    end_if_nothing_gets_on()
    found: dict[str, Any] = {}
    with contextlib.suppress(TimeoutError):
        for name, end in reading.items():
            found[name] = json.loads(os.fdopen(end).read() or '{"type": "ended without a word"}')
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps({name: {"type": "still waits"} for name in JOBS} | found))


if __name__ == "__main__":
    main(sys.argv[1])
