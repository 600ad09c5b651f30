"""Ranks of which one fails, or differs, before its program runs: what all say, and whether they go on.

    python failing_ranks.py FOLDER

prints, for each rank, each call's seconds and message, as JSON. The process group waits for minutes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("error")
# torch imports its own TorchScript modules, and says so.
warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked_ranks import of_each_rank  # noqa: E402
from torch._dynamo import register_backend  # noqa: E402

from torchard import (  # noqa: E402
    Mesh,
    P,
    RankFailed,
    SpecError,
    jit,
    pipeline,
    place,
    psum,
    repeat,
    shard,
    shard_map,
)
from torchard.sharding.values import notes  # noqa: E402

WORLD = 4
Call = Callable[[], Any]


def calls(mesh: Mesh, rank: int) -> dict[str, Call]:
    """Calls in which rank 1 does otherwise than the others."""
    odd = rank == 1
    x = place(torch.arange(16.0).reshape(8, 2), mesh, P("dp", "tp"))

    def fails(x: torch.Tensor) -> torch.Tensor:
        if odd:
            raise ValueError("no such token")
        return x.sum()

    def fails_late(x: torch.Tensor) -> torch.Tensor:
        time.sleep(1.5 * odd)
        return fails(x)

    known = shard(lambda x: x.sum(), mesh)
    assert float(known(x)) == 120.0
    cached = shard(lambda x: (x * 2).sum(), mesh)
    cached(x)

    def places() -> Any:
        return shard(fails, mesh)(x) if odd else place(torch.ones(3), mesh, P())

    def staged(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fails((x @ w).sin() @ w)

    def joint(x: torch.Tensor) -> torch.Tensor:
        return fails(x.reshape(-1))

    w = torch.eye(2)

    def body(_: Any, c: torch.Tensor) -> torch.Tensor:
        return c + fails(c)

    @register_backend(name="odd")
    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        left[0] -= 1
        time.sleep(late[0])
        if odd and left[0] < 0:
            raise ValueError("no such token")
        return graph.forward

    left, late = [0], [0.0]

    def compiling(fn: Call, compiled: int = 0, seconds: float = 0.0) -> Any:
        """A call in which the compiler of rank 1 fails, after some parts that it compiles."""
        left[0], late[0] = compiled, seconds if odd else 0.0
        return fn()

    def compiled(x: Any = x, times: float = 8.0) -> Any:
        return jit(shard(lambda x: (x * times).sum(), mesh), backend="odd")(x)

    def gradient(fn: Any) -> Any:
        return torch.func.grad(jit(shard(fn, mesh), backend="odd"))(x)

    again = jit(shard(lambda x: (x * 11).sum(), mesh), backend="odd")

    def twice() -> Any:
        if odd:
            with contextlib.suppress(ValueError):
                again(x)
        else:
            with contextlib.suppress(RankFailed):
                again(x)
        left[0] = 9
        return float(again(x))

    return {
        "compiler": lambda: compiling(compiled),
        "late compiler": lambda: compiling(lambda: compiled(times=10.0), seconds=1.5),
        "compiler of a forward": lambda: compiling(lambda: gradient(lambda x: x.sin().sum())),
        "compiler of a backward": lambda: compiling(lambda: gradient(lambda x: x.cos().sum()), 1),
        "compiled again": lambda: compiling(twice),
        "shard": lambda: shard(fails, mesh)(x),
        "late": lambda: shard(fails_late, mesh)(x),
        "grad": lambda: torch.func.grad(shard(fails, mesh))(x),
        "inside": lambda: shard(torch.func.grad(fails), mesh)(x),
        "jit": lambda: jit(fails, backend="eager")(x),
        "nested": lambda: jit(lambda x: shard(fails, mesh)(x) * 2, backend="eager")(x),
        "pipeline": lambda: pipeline(staged, mesh, "dp", microbatches=2, batch=(None, 0))(w, x.full()),
        "shard_map": lambda: shard_map(lambda x: psum(fails(x), "dp"), mesh, P("dp"), P())(x.full()),
        "joint axes": lambda: shard(joint, mesh, out_specs=P())(place(x.full(), mesh, P(("tp", "dp")))),
        "loop": lambda: shard(lambda x: repeat(body, torch.zeros(2), x), mesh)(x),
        "eager": lambda: x.reshape(3, 3) if odd else x + x,
        "a spec": lambda: shard(known.fn, mesh, out_specs=P("no") if odd else P())(x),
        "others place": places,
        "others have a plan": lambda: shard(fails, mesh)(x) if odd else known(x),
        "only one communicates": lambda: shard(lambda x: x.sum() if odd else x * 3, mesh)(x),
        "only one is new": lambda: (shard(lambda x: x.sum() * 5, mesh) if odd else cached)(x),
        "only one is not new": lambda: (cached if odd else shard(lambda x: x.sum() * 6, mesh))(x),
        "another plan": lambda: (cached if odd else known)(x),
        "all": lambda: shard(lambda x: x.reshape(3, 3), mesh)(x),
    }  # fmt: skip


def said(call: Call) -> tuple[float, str]:
    """How long a call takes, and its error."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, "no error"


def found_by(rank: int, folder: str) -> dict[str, Any]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(minutes=10),
    )
    mesh = Mesh({"dp": 2, "tp": 2})
    x = place(torch.arange(16.0).reshape(8, 2), mesh, P("dp", "tp"))
    known = shard(lambda x: x.sum(), mesh)
    found: dict[str, Any] = {}
    for name, call in calls(mesh, rank).items():
        print(f"rank {rank}: {name}", file=sys.stderr, flush=True)  # if it hangs: where
        fresh = shard(lambda x, name=name: (x + len(name)).sum(), mesh)
        after = [float(run(x)) for run in (known, fresh)] if found else []
        assert after in ([], [120.0, 120.0 + 16 * len(name)]), after
        found[name] = said(call)
    if rank == 1:  # as when an error ends the process
        sys.last_value = SpecError("not this one")
        notes._note_end()
    else:
        found["ended"] = said(lambda: shard(lambda x: x.sum() * 7, mesh)(x))
    return found


def main(folder: str) -> None:
    # Forked: to load torch again takes each rank longer than all calls.
    print(json.dumps(of_each_rank(functools.partial(found_by, folder=folder), WORLD)))


if __name__ == "__main__":
    main(sys.argv[1])
