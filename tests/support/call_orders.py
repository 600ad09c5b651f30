"""Ranks that make different calls, or the same ones in another order, or from two threads.

    python call_orders.py WORLD FOLDER ROUNDS

prints, for each rank, what became of every call, as JSON: ``right``, ``wrong``, or the error's type.
"""

from __future__ import annotations

import datetime
import functools
import json
import random as drawn
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

warnings.simplefilter("error")
# torch imports its own TorchScript modules, and says so.
warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forked_ranks import of_each_rank  # noqa: E402

import torchard.sharding.values.mesh as mesh_module  # noqa: E402
from torchard import (  # noqa: E402
    CollectiveError,
    Mesh,
    P,
    PlanMismatch,
    ShapeDtype,
    jit,
    place,
    psum,
    shard,
    shard_map,
)
from torchard.functional.torch_internals.accessors import optional as internals  # noqa: E402
from torchard.sharding.lowering import call_order  # noqa: E402
from torchard.sharding.values import host_links, notes, store_allgather  # noqa: E402

# Calls in a round, and how often a rank keeps to the order of the others.
CALLS, KEEPS = 4, 0.7
Plan = Callable[[], bool]


def plans(mesh: Mesh) -> dict[str, Plan]:
    """Calls of cached plans, and whether what they give is right. Many send the same shapes."""
    x = torch.arange(1.0, 7.0)
    y = place(x, mesh, P("tp"))
    found: dict[str, Plan] = {}

    def plan(
        fn: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[..., Any], name: str
    ) -> None:
        want, run = fn(x), wrap(fn)
        found[name] = lambda: bool(torch.equal(run(y), want))

    def sharded(fn: Any) -> Any:
        return shard(fn, mesh, out_specs=P())

    for i in (2, 3, 4):
        plan(lambda x, i=i: (x * i).sum(), sharded, f"sum {i}")  # type: ignore[misc]
    plan(lambda x: (x + 1).sum(), lambda fn: jit(sharded(fn), backend="eager"), "jit")
    plan(lambda x: (x - 1).sum(), lambda fn: jit(sharded(fn), backend="aot_eager"), "compiled")
    plan(lambda x: x.amax(), sharded, "amax")
    plan(lambda x: x * 5, sharded, "gathered")
    plan(lambda x: torch.func.grad(lambda x: (x.sum() * 2).square())(x), sharded, "grad")
    manual = shard_map(lambda x: psum((x * 7).sum(), "tp"), mesh, P("tp"), P())
    found["manual"] = lambda: float(manual(x)) == 7 * float(x.sum())
    outside = shard(lambda x: (x.sum() * 3).square(), mesh)

    def backward() -> bool:
        leaf = x.clone().requires_grad_()
        loss = outside(place(leaf, mesh, P("tp"), check_replicated=False))
        loss.backward()
        assert leaf.grad is not None
        return bool(torch.equal(leaf.grad, (18 * x.sum()).expand(6)))

    found["backward"] = backward
    found["local"] = lambda: bool(torch.equal(local(y).local, y.local * 9))
    local = shard(lambda x: x * 9, mesh)
    return found


def outcome(call: Plan) -> str:
    try:
        return "right" if call() else "wrong"
    except PlanMismatch as error:
        assert "Nothing was sent" in str(error), error
        assert "(args[" not in str(error).splitlines()[0], error  # what differs comes first
        return "PlanMismatch"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def in_any_order(rank: int, known: dict[str, Plan], rounds: int) -> list[list[str]]:
    """What was called, and what came of it, round by round."""
    ours, own = drawn.Random(5), drawn.Random(f"{rank}")
    sending = [name for name in known if name != "local"]
    found = []
    for _ in range(rounds):
        names = ours.sample(sending, CALLS)
        if own.random() > KEEPS:
            names[own.randrange(CALLS)] = own.choice(sending)
        if own.random() > KEEPS:
            own.shuffle(names)
        for name in names:
            if own.random() > KEEPS:  # nobody else need know of it
                assert known["local"]()
            found.append([name, outcome(known[name])])
    return found


def from_two_threads(rank: int, known: dict[str, Plan], mesh: Mesh, rounds: int) -> list[str]:
    """Both call plans of their own, and one in common on values of their own."""
    found: list[str] = []
    common = shard(lambda x: (x * 11).sum(), mesh)
    values = {i: place(torch.full((6,), float(i)), mesh, P("tp")) for i in (1, 2)}

    def many(i: int) -> None:
        own = drawn.Random(f"{rank} {i}")
        for _ in range(rounds):
            calls = [known[f"sum {i + 1}"], lambda: float(common(values[i])) == 66.0 * i]
            found.extend(map(outcome, calls))
            for _ in range(own.randrange(3)):
                assert known["local"]()

    common(values[1])
    threads = [threading.Thread(target=many, args=(i,), name=f"loop {i}") for i in values]
    for thread in threads[:: 1 if rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def after_one_rank_looked(rank: int, mesh: Mesh) -> str:
    """Rank 0 looks at more programs than are kept."""
    x = place(torch.arange(6.0), mesh, P("tp"))
    run = shard(lambda x: x.sum(), mesh)
    run.cache_size = 2
    for _ in range(2):
        assert float(run(x)) == 15.0
    if rank == 0:
        for n in range(4):
            run.lower(ShapeDtype((n + 1,)))
    return outcome(lambda: float(run(x)) == 15.0)


def beside_another_backend(rank: int, world: int) -> list[str]:
    """Where the default group carries a device's tensors only, calls are compared by another one."""
    with mock.patch.object(dist, "get_backend_config", lambda _: "cuda:nccl"):
        made = mesh_module._host_group.__wrapped__
        host = made(dist.group.WORLD, tuple(range(world)), datetime.timedelta(seconds=60))
    assert host is not dist.group.WORLD
    mesh = Mesh({"tp": world})
    mesh.host_group = host
    known = plans(mesh)
    first = [outcome(known[name]) for name in ("sum 2", "sum 3")]
    other = outcome(known["sum 3" if rank else "sum 2"])
    return [*first, other, outcome(known["sum 2"])]


def given_up(rank: int, how: BaseException) -> list[str]:
    """Rank 0 gives up a call before the others come to it; then each makes that call, and one more."""
    call_order._circle.cache_clear()  # as nobody of a circle goes on after this
    mesh, store = Mesh({"tp": dist.get_world_size()}), internals.default_store()
    run = shard(lambda x: x.sum(), mesh, out_specs=P())
    values = [place(torch.full((6,), float(i)), mesh, P("tp")) for i in range(3)]
    found = [outcome(lambda: float(run(values[0])) == 0.0)]
    if rank == 0:
        with mock.patch.object(host_links.HostLink, "receive", side_effect=how):
            try:
                run(values[1])
            except (KeyboardInterrupt, CollectiveError) as error:
                found.append(type(error).__name__)
        store.set(f"given up {how!r}", "")
    store.wait([f"given up {how!r}"])
    for i in (1, 2):
        try:
            found.append("right" if float(run(values[i])) == 6.0 * i else "wrong")
        except CollectiveError as error:
            assert "Stop all ranks" in str(error), error
            found.append("CollectiveError")
    return found


def lost_in_a_comparison(rank: int) -> list[str]:
    """What rank 0 is told that has a new plan, or fails, while the others wait for it in another call.

    It joins their comparison, in which it loses them.
    """

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such token")

    def joined(fn: Callable[[torch.Tensor], torch.Tensor]) -> str:
        call_order._circle.cache_clear()
        mesh = Mesh({"tp": dist.get_world_size()})
        run, new = (shard(each, mesh, out_specs=P()) for each in (torch.sum, fn))
        x = place(torch.arange(6.0), mesh, P("tp"))
        assert float(run(x)) == 15.0
        if rank:
            return outcome(lambda: float(run(x)) == 15.0)
        error = RuntimeError("Timed out")
        with mock.patch.object(host_links.HostLink, "receive", side_effect=error):
            return outcome(lambda: bool(new(x)))

    return [joined(fn) for fn in (torch.amax, fails)]


def going_on_at_once(rank: int) -> list[Any]:
    """Rank 0 has a new plan, for which the others do not wait; all of them then make another call.

    With, on rank 0, whether it is still known to wait for the others when it tells them of its plan.
    """
    call_order._circle.cache_clear()
    mesh, store = Mesh({"tp": dist.get_world_size()}), internals.default_store()
    run, new = (shard(fn, mesh, out_specs=P()) for fn in (torch.sum, torch.amin))
    x, reports = place(torch.arange(6.0), mesh, P("tp")), []
    send = host_links.HostLink.send

    def told(link: host_links.HostLink, message: bytes) -> None:
        turn = store_allgather.next_turn() - 1
        reports.append(store.check([notes.key_of(f"{turn}", 0)]))
        send(link, message)

    found: list[Any] = [outcome(lambda: float(run(x)) == 15.0)]
    if rank:
        found.append(outcome(lambda: float(run(x)) == 15.0))
    else:
        with mock.patch.object(host_links.HostLink, "send", told):
            found.append(outcome(lambda: float(new(x)) == 0.0))
    y = place(torch.arange(6.0) + 1, mesh, P("tp"))
    return [*found, outcome(lambda: float(new(y)) == 1.0), reports[:1]]


def found_by(rank: int, world: int, folder: str, rounds: int) -> dict[str, Any]:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = Mesh({"tp": world})
    known = plans(mesh)
    first = [outcome(call) for call in known.values()]
    calls = in_any_order(rank, known, rounds)
    looked = after_one_rank_looked(rank, mesh)
    threads = from_two_threads(rank, known, mesh, rounds)
    last = [outcome(call) for call in known.values()]
    beside = beside_another_backend(rank, world)
    linked = [at.by_links for at in call_order._circle(mesh.host_group, tuple(range(world))).rounds]
    ways = (KeyboardInterrupt(), RuntimeError("Timed out"))
    onwards = going_on_at_once(rank)
    left = [given_up(rank, how) for how in ways]
    lost = lost_in_a_comparison(rank)
    dist.destroy_process_group()
    found = {"alone": [*first, looked, *last], "calls": calls, "threads": threads}
    after = {"onwards": onwards, "left": left, "lost": lost}
    return {**found, "beside": beside, "linked": linked, **after}


def main(world: int, folder: str, rounds: int) -> None:
    # Forked: to load torch again takes each rank longer than all calls.
    run = functools.partial(found_by, world=world, folder=folder, rounds=rounds)
    print(json.dumps(of_each_rank(run, world)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
