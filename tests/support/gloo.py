"""Checks that run in every process of a real group; ``python gloo.py WORLD STORE`` prints JSON.

Each check returns what the test then asserts on; what raises is reported as its message.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paths import EXAMPLES

warnings.simplefilter("error")
# torch imports its own TorchScript modules, and says so.
warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)

sys.path.append(str(EXAMPLES))

import gloo_checkpoint  # noqa: E402
import gloo_control  # noqa: E402
import gloo_measured  # noqa: E402
import gloo_operations  # noqa: E402
import gloo_scatters  # noqa: E402
import gloo_storage  # noqa: E402
import gloo_traces  # noqa: E402
import live_bytes  # noqa: E402
import neighbours  # noqa: E402
import seeds  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402
from collective_counts import Counter  # noqa: E402
from forked_ranks import print_found  # noqa: E402
from ranks import COLLECTIVES  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import torchard  # noqa: E402
import torchard.sharding.values.store_allgather as exchange_module  # noqa: E402
from torchard import (  # noqa: E402
    Mesh,
    MeshTensor,
    P,
    accumulate,
    from_dtensor,
    global_norm,
    jit,
    nn,
    pipeline,
    place,
    random,
    redistribute,
    repeat,
    shard,
    shard_map,
    to_dtensor,
)
from torchard.functional.memory.planned_code import poisoned  # noqa: E402
from torchard.sharding.lowering import call_order  # noqa: E402
from torchard.sharding.pipelining.schedules import SCHEDULES  # noqa: E402

CHECKS: dict[str, Callable[[int, int], Any]] = {
    **gloo_checkpoint.CHECKS,
    **gloo_measured.CHECKS,
    **gloo_operations.CHECKS,
    **gloo_scatters.CHECKS,
    **gloo_control.CHECKS,
    **gloo_storage.CHECKS,
    **gloo_traces.CHECKS,
}

# What is the same for any number of ranks is checked on two alone.
ON_TWO = {
    *("caches_in_place", "gathers_by_any_form"),
    *("single_operations", "names_in_a_trace", "planned_memory", "policies_that_differ"),
    *("every_dtype_moves", "every_dtype_adds_up", "checkpointed_steps", "measured_machine"),
    *("bytes_of_a_fully_sharded_step", "a_batch_shorter_than_the_mesh"),
    *("gradient_through_place_and_full", "one_rank_gathers_alone", "one_rank_retraces_alone"),
    *("one_rank_measures_alone",),
    *("storage_one_rank_does_not_call", "storage_one_rank_dies"),
}
# What two ranks do is less than what three do, who send on rings and are not all neighbours, unevenly.
ON_THREE = {
    *("manual_collectives", "neighbours_equal_virtual", "every_reduction"),
    *("ten_steps_of_adamw", "dropout_is_the_same_everywhere"),
}


def check(fn: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    CHECKS[fn.__name__] = fn
    return fn


def worst(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    assert have.keys() == want.keys()
    return max(
        float((have[k] - v).abs().max() / v.abs().max().clamp(min=1e-300)) for k, v in want.items()
    )


def seed_of(world: int) -> seeds.Seed:
    return seeds.S0 if world == 2 else seeds.S4


def results(mesh: Mesh, seed: seeds.Seed, backend: str | None = None) -> dict[str, torch.Tensor]:
    params, x, ct = seed.normal(torch.float64)
    fn = shard(seed.forward, mesh, out_specs=seed.out_spec)
    arguments = seeds.sharded_arguments(seed, mesh, params, x)
    return seeds.outputs_and_gradients(jit(fn, backend=backend) if backend else fn, *arguments, ct)


@functools.cache
def seed_on_ranks(world: int) -> dict[str, torch.Tensor]:
    """For two checks."""
    return results(Mesh({"tp": world}), seed_of(world))


@check
def seed_equals_virtual(rank: int, world: int) -> float:
    virtual = results(Mesh({"tp": world}, virtual=True), seed_of(world))
    return worst(seed_on_ranks(world), virtual)


@check
def seed_equals_one_device(rank: int, world: int) -> float:
    seed = seed_of(world)
    params, x, ct = seed.normal(torch.float64)
    want = seeds.outputs_and_gradients(seed.forward, params, x, ct)
    return worst(seed_on_ranks(world), want)


@check
def compiled_seed_equals_one_device(rank: int, world: int) -> float:
    """Down to kernels on two ranks; on three, where parts are uneven, as the compiler takes it in."""
    backend = "inductor" if world == 2 else "aot_eager"
    seed = seeds.S4 if world == 3 else seeds.Seed(
        (64, 64, 64), (2, 8), seeds.S0.specs, None, P(), seeds.S0.activation
    )
    params, x, ct = seed.normal(torch.float64)
    want = seeds.outputs_and_gradients(seed.forward, params, x, ct)
    return worst(results(Mesh({"tp": world}), seed, backend), want)


@check
def collectives_that_really_run(rank: int, world: int) -> dict[str, int]:
    """Counted by a dispatch mode, not by the plan."""
    seed, mesh = seed_of(world), Mesh({"tp": world})
    params, x, ct = seed.normal(torch.float32)
    fn = shard(lambda p, x, c: seed.forward(p, x), mesh, out_specs=seed.out_spec)
    arguments = seeds.sharded_arguments(seed, mesh, params, x)
    leaves = [t.requires_grad_() for v in arguments[0].values() for t in v.parts]
    inputs = arguments[1].parts if isinstance(arguments[1], MeshTensor) else (arguments[1],)
    leaves += [t.requires_grad_() for t in inputs]
    out = fn(*arguments, ct)
    local = gloo_scatters.as_local(out)
    torch.autograd.grad(local, leaves, torch.ones_like(local))  # plans the backward
    with Counter() as count:
        out = fn(*arguments, ct)
        local = gloo_scatters.as_local(out)
        torch.autograd.grad(local, leaves, torch.ones_like(local))
    return count.counts


@check
def bytes_of_a_fully_sharded_step(rank: int, world: int) -> dict[str, int]:
    """gloo's own buffers too, which a collective holds until it is waited for."""
    size = train_gpt.Size(context=16, width=48, heads=4, layers=2)
    return live_bytes.fully_sharded(Mesh({"dp": world}), size, rows=2)


@check
def small_integers_are_exact(rank: int, world: int) -> bool:
    import dataclasses

    seed = dataclasses.replace(seed_of(world), activation=torch.relu)
    good = True
    for dtype in (torch.float32, torch.bfloat16):
        params, x, ct = seed.integers(dtype)
        wide = {k: v.double() for k, v in params.items()}
        want = seeds.outputs_and_gradients(seed.forward, wide, x.double(), ct.double())
        mesh = Mesh({"tp": world})
        fn = shard(seed.forward, mesh, out_specs=seed.out_spec)
        have = seeds.outputs_and_gradients(
            fn, *seeds.sharded_arguments(seed, mesh, params, x), ct
        )
        good &= all(torch.equal(have[k].double(), v) for k, v in want.items())
    return good


@check
def accumulated_over_slices(rank: int, world: int) -> bool:
    """A batch that is placed over the ranks, in slices of each rank's rows: one all_reduce, and exact."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ w) * x.sum(1, keepdim=True)).sum()

    w = torch.arange(12.0).reshape(4, 3) - 5
    x = torch.arange(4.0 * 8 * world).reshape(8 * world, 4) % 7 - 3
    mesh = Mesh({"dp": world})
    step = shard(accumulate(torch.func.grad_and_value(loss), 4, batch=(None, 0)), mesh)
    placed = place(x, mesh, P("dp"))
    sent = [c.kind for c in step.lower(w, placed).collectives]
    want = torch.func.grad_and_value(loss)(w, x)
    have = [v.full() if isinstance(v, MeshTensor) else v for v in step(w, placed)]
    return set(sent) == {"all_reduce"} and len(sent) <= 2 and all(map(torch.equal, have, want))


@check
def gradients_of_loops_outside(rank: int, world: int) -> bool:
    """The first call of all is inside of a gradient; both halves have loops, exact on small integers."""

    def loss(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: torch.relu(x @ w) * 2 - x, ws, x).sum()

    ws = torch.arange(36.0).reshape(4, 3, 3) % 3 - 1
    x = torch.arange(world * 6.0).reshape(world * 2, 3) % 5 - 2
    call_order._circle.cache_clear()
    mesh, want, right = Mesh({"dp": world}), torch.func.grad(loss, (0, 1))(ws, x), []
    for specs in ((P(None, "dp"), P("dp")), (P(), P("dp")), (P(None, None, "dp"), P())):
        run = shard(loss, mesh, in_specs=specs)
        have = [seeds.whole(g) for g in torch.func.grad(run, (0, 1))(ws, x)]
        right += map(torch.equal, have, want)
    return all(right)


@check
def planned_memory(rank: int, world: int) -> bool:
    """Steps in planned memory, data parallel and fully sharded: exact, gradients inside and outside.

    Compiled steps of donated parameters, too.
    """

    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.relu(x @ w) - x
        return x.sum()

    def step(params: list[torch.Tensor], x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        grads, value = torch.func.grad_and_value(loss)(params, x)
        return [p - g for p, g in zip(params, grads, strict=True)], value

    params = [(torch.arange(36.0).reshape(6, 6) * (i + 1)) % 3 - 1 for i in range(4)]
    x = torch.arange(world * 24.0).reshape(world * 4, 6) % 5 - 2
    mesh, want, right = Mesh({"dp": world}), step(params, x), []
    with poisoned():
        for backend, spec in itertools.product(("eager", "inductor"), (P(), P("dp"))):
            specs = [spec] * len(params)
            sharded = shard(step, mesh, in_specs=(specs, P("dp")), out_specs=(specs, P()))
            memory: Any = "planned" if backend == "eager" else "allocated"
            run = jit(sharded, backend=backend, memory=memory, donate_argnums=0)
            for _ in range(4):
                new, value = run(place([p.clone() for p in params], mesh, specs), x)
                right += map(torch.equal, map(seeds.whole, new), want[0])
                right.append(torch.equal(seeds.whole(value), want[1]))
            if backend == "eager":
                outside = shard(loss, mesh, in_specs=(specs, P("dp")))
                grads = torch.func.grad(jit(outside, backend=backend, memory="planned"))(params, x)
                right += map(torch.equal, map(seeds.whole, grads), torch.func.grad(loss)(params, x))
    return all(right)


@check
def pipelined(rank: int, world: int) -> list[str]:
    """Every schedule: exact on small integers, each at home on a stage.

    Gradients inside and outside, parameters whole and placed, in turn; on three ranks the others.
    """

    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.relu(x @ w) - x
        return x.sum()

    layers, mesh = 2 * world, Mesh({"pp": world})
    params = [(torch.arange(9.0).reshape(3, 3) * (i + 1)) % 3 - 1 for i in range(layers)]
    x = torch.arange(60.0).reshape(20, 3) % 5 - 2
    want, bad = torch.func.grad(loss)(params, x), []
    placed = place(params, mesh, [P().at(pp=i * world // layers) for i in range(layers)])
    for number, schedule in enumerate(SCHEDULES):
        count, given = ((5, params), (4, placed))[(number + world) % 2]

        def transform(fn: Any, n: int = count, how: str = schedule) -> Any:
            return pipeline(fn, mesh, "pp", microbatches=n, batch=(None, 0), schedule=how)

        inside = (number // 2 + world) % 2
        step = transform(torch.func.grad(loss)) if inside else torch.func.grad(transform(loss))
        have = [g.full() if isinstance(g, MeshTensor) else g for g in step(given, x)]
        if not all(map(torch.equal, have, want)):
            bad.append(f"{schedule}, {count} microbatches")
    held = [p.local.numel() for p in placed]
    if held != [9 if i * world // layers == rank else 0 for i in range(layers)]:
        bad.append(f"holds {held}")
    return bad


@check
def one_rank_compiles(rank: int, world: int) -> str:
    """Its sends would be broadcasts, which the others' direct ones do not meet."""
    mesh, ws = Mesh({"pp": world}), [torch.eye(3)] * world
    step = pipeline(lambda ws, x: functools.reduce(torch.matmul, ws, x), mesh, "pp", microbatches=1)
    run = step if rank else jit(step, backend="eager")
    return message(lambda: run(ws, torch.ones(2, 3)))


@check
def ten_steps_of_adamw(rank: int, world: int) -> float:
    seed = seeds.S4
    params, x, ct = seed.normal(torch.float64)
    mesh = Mesh({"tp": world})
    _, want = seeds.train(seed.forward, params, x, ct, 10)
    _, have = seeds.train(seed.forward, *seeds.sharded_arguments(seed, mesh, params, x), ct, 10)
    return worst(have, want)


@check
def transformers(rank: int, world: int) -> dict[str, Any]:
    """Against one device; and what really runs where all is split, unevenly over three ranks.

    That is one gather per layer and pass, one scatter per gradient, however many tensors they carry.
    """
    import transformer
    from optree import tree_leaves

    def flat(tree: Any) -> dict[str, torch.Tensor]:
        found = tree_leaves(tree, is_leaf=lambda v: isinstance(v, MeshTensor))
        return {str(i): seeds.whole(v) for i, v in enumerate(found)}

    batch = transformer.batch(4)
    want = flat(transformer.Recipe({}, P()).step(transformer.parameters(), *batch))
    by_heads = transformer.tensor_parallel("tp")
    recipes = {
        2: (
            transformer.Recipe({"dp": world}, P(), P("dp")),
            transformer.Recipe({"tp": world}, by_heads, P(), P(None, "tp")),
        ),
        3: (transformer.Recipe({"dp": world}, P("dp"), P("dp")),),
    }
    differences, counts = [], {}
    for recipe in recipes[world]:
        mesh = Mesh(recipe.mesh)
        params = place(transformer.parameters(), mesh, recipe.specs)
        args = (params, *(place(t, mesh, recipe.batch) for t in batch))
        step = shard(recipe.step, mesh, out_specs=(recipe.specs, P()))
        differences.append(worst(flat(step(*args)), want))
        if world == 3:
            with Counter() as count:
                step(*args)
            counts = count.counts
    return {"worst": max(differences), "ran": counts}


SPECS = [P(), P("tp"), P(None, "tp"), P(None, None, "tp")]
DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.int8, torch.int16, torch.int64, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@check
def every_reshard(rank: int, world: int) -> bool:
    """Even, uneven and empty shards, every pair of specs, by every collective there is."""
    mesh, good = Mesh({"tp": world}), True
    for shape in ((4, 6, 2), (5, 7, 1)):
        x = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
        for before in SPECS:
            for after in SPECS:
                moved = redistribute(place(x, mesh, before), after)
                good &= torch.equal(moved.full(), x)
    return good


@check
def every_dtype_moves(rank: int, world: int) -> list[str]:
    """Those whose bits, any there are, do not arrive by a gather, an exchange, and from a neighbour."""
    mesh, wrong = Mesh({"tp": world}), []
    for dtype in DTYPES:
        seed = torch.Generator().manual_seed(7)
        bits = torch.randint(0, 256, (5, 7 * dtype.itemsize), dtype=torch.uint8, generator=seed)
        x = bits % 2 == 0 if dtype == torch.bool else bits.view(dtype)
        split = place(x, mesh, P("tp"))
        there = redistribute(split, P(None, "tp"))
        arrived = {"gather": (split.full(), x), "exchange": (there.full(), x)}
        if dtype not in (torch.uint16, torch.uint32, torch.uint64):  # of which torch rolls none
            roll = shard(lambda x: x.roll(1, 0), mesh, out_specs=P("tp"))
            arrived["roll"] = roll(split).full(), x.roll(1, 0)
        for name, (have, want) in arrived.items():
            if not torch.equal(*(t.contiguous().view(torch.uint8) for t in (have, want))):
                wrong.append(f"{name} {dtype}")
    return wrong


@check
def every_dtype_adds_up(rank: int, world: int) -> list[str]:
    """Sums that wrap, of complex numbers, and extremes, on every rank and split again; exactly."""
    mesh, wrong = Mesh({"tp": world}), []
    seed = torch.Generator().manual_seed(7)
    x = torch.randint(-(2**15), 2**15, (5, 7), generator=seed)
    fns: dict[str, Any] = {
        "sum": lambda x: x.sum(0, dtype=x.dtype),
        "amax": lambda x: x.amax(0),
        "amin": lambda x: x.amin(0),
    }
    for dtype in (torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128, torch.bool):
        y = torch.complex(x.double(), x.flip(0).double()).to(dtype) if dtype.is_complex else x.to(dtype)
        for name, fn in fns.items():
            if name != "sum" and dtype.is_complex:
                continue
            for spec in (P(), P("tp")):
                have = seeds.whole(shard(fn, mesh, out_specs=spec)(place(y, mesh, P("tp"))))
                if not torch.equal(have, fn(y)):
                    wrong.append(f"{name} {dtype} to {spec}")
    return wrong


@check
def every_reduction(rank: int, world: int) -> bool:
    """Sums, maxima and minima of split dims, into every spec; NaN and infinities kept."""
    real, virtual, good = Mesh({"tp": world}), Mesh({"tp": world}, virtual=True), True
    x = torch.arange(35.0).reshape(5, 7).sin()
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    counts = (lambda x: (x > 0).to(x.dtype).sum(0), lambda x: (x > 0).any(0))
    for fn in (lambda x: x.amax(0), lambda x: x.amin(0), *counts):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for spec in (P(), P("tp")):
                y = x.to(dtype)
                have = shard(fn, real, out_specs=spec)(place(y, real, P("tp")))
                want = shard(fn, virtual, out_specs=spec)(place(y, virtual, P("tp")))
                a, b = (seeds.whole(v).double().nan_to_num(99.0) for v in (have, want))
                good &= torch.equal(a, b)
    return good


@check
def neighbours_equal_virtual(rank: int, world: int) -> list[str]:
    """The functions of neighbours whose results are not those of the virtual runtime."""
    return neighbours.differing(Mesh({"tp": world}), Mesh({"tp": world}, virtual=True))


@check
def dropout_is_the_same_everywhere(rank: int, world: int) -> bool:
    mesh, x = Mesh({"tp": world}), torch.ones(7, 9)
    want = nn.dropout(random.key(5), x, 0.5)
    run = shard(lambda k, x: nn.dropout(k, x, 0.5), mesh)
    placed = [place(x, mesh, s) for s in (P(), P("tp"), P(None, "tp"))]
    return all(torch.equal(run(random.key(5), y).full(), want) for y in placed)


@check
def from_local_without_a_shape(rank: int, world: int) -> list[int]:
    mesh = Mesh({"tp": world})
    part = torch.full((4 if rank < world - 1 else 3, 2), float(rank))
    value = MeshTensor.from_local(part, mesh, P("tp"))
    return [*value.shape, int(value.full().sum())]


@check
def from_local_of_shards_that_do_not_fit(rank: int, world: int) -> list[str]:
    """The last rank's shard is too long, has another size in a dim that is not split, or another kind."""
    mesh, last = Mesh({"tp": world}), rank == world - 1
    parts = [
        torch.ones(4 if last else 3, 2),
        torch.ones(3, 3 if last else 2),
        torch.ones(3, 2, dtype=torch.float64 if last else torch.float32),
        torch.ones(3, 2, 1)[..., 0 if not last else slice(None)],
    ]
    said = [message(lambda part=part: MeshTensor.from_local(part, mesh, P("tp"))) for part in parts]  # type: ignore[misc]
    given = torch.ones(4 if rank == 1 else 3, 2)
    return [
        *said,
        message(lambda: MeshTensor.from_local(given, mesh, P("tp"), shape=(3 * world, 2))),
    ]


@check
def dtensor_and_back(rank: int, world: int) -> bool:
    mesh, x = Mesh({"tp": world}), torch.arange(21.0).reshape(7, 3)
    good = True
    for spec in (P(), P("tp"), P(None, "tp")):
        value = place(x, mesh, spec)
        there = to_dtensor(value)
        good &= torch.equal(there.full_tensor(), x)
        back = from_dtensor(there, mesh)
        good &= torch.equal(back.full(), x) and back.spec == value.spec
    return good


@check
def dtensor_that_is_a_sum(rank: int, world: int) -> bool:
    """Its summands are added up."""
    mesh, x = Mesh({"tp": world}), torch.arange(21.0).reshape(7, 3)
    sum_ = DTensor.from_local(x * (rank + 1), mesh.device_mesh, [Partial()])
    found = from_dtensor(sum_, mesh)
    want = place(x * (world * (world + 1) // 2), mesh, P())
    return found.spec == want.spec and torch.equal(found.full(), want.full())


@check
def dtensor_without_a_counterpart(rank: int, world: int) -> list[str]:
    """What is said of those that have none, in both directions."""
    mesh, x = Mesh({"tp": world}), torch.arange(4.0 * world)
    other = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    strided = DTensor.from_local(x[:4], mesh.device_mesh, [_StridedShard(0, split_factor=2)])
    flat = shard(lambda x: x.reshape(-1), mesh)(place(x.reshape(2, -1), mesh, P(None, "tp")))
    cases: list[Callable[[], object]] = [
        lambda: from_dtensor(distribute_tensor(x, other, [Shard(0)]), mesh),
        lambda: from_dtensor(strided),
        lambda: to_dtensor(flat),
    ]
    said = []
    for case in cases:
        try:
            said.append(repr(case()))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@check
def norm_counts_each_value_once(rank: int, world: int) -> float:
    mesh, x = Mesh({"tp": world}), torch.arange(21.0, dtype=torch.float64).reshape(7, 3)
    tree = {"split": place(x, mesh, P("tp")), "whole": place(x, mesh, P()), "plain": x}
    want = (3 * (x**2).sum()) ** 0.5
    return float((global_norm(tree) - want).abs())


@check
def a_batch_shorter_than_the_mesh(rank: int, world: int) -> float:
    """Ranks without rows still take part in gathers that only the others need."""
    mesh = Mesh({"dp": world})
    w = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()
    x = torch.arange(4.0, dtype=torch.float64).reshape(1, 4)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sum()

    have = torch.func.grad(shard(f, mesh))(place(w, mesh, P("dp")), place(x, mesh, P("dp")))
    compiled = torch.func.grad(jit(shard(f, mesh)))
    again = compiled(place(w, mesh, P("dp")), place(x, mesh, P("dp")))
    want = torch.func.grad(f)(w, x)
    return max(worst({"w": v.full()}, {"w": want}) for v in (have, again))


@check
def gradient_through_place_and_full(rank: int, world: int) -> float:
    mesh = Mesh({"tp": world})
    w, x = torch.arange(6.0).sin().double(), torch.arange(6.0).cos().double()

    def f(w: torch.Tensor) -> torch.Tensor:
        moved = shard(lambda a, b: a * b, mesh)(place(w, mesh, P("tp")), place(x, mesh, P("tp")))
        return moved.full().square().sum()

    have = torch.func.grad(f)(w)
    return worst({"w": have}, {"w": torch.func.grad(lambda w: (w * x).square().sum())(w)})


@check
def manual_collectives(rank: int, world: int) -> dict[str, float]:
    """Inside shard_map: values and gradients as on a virtual mesh, also with an axis of one."""
    x = torch.randn(36, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    w = torch.full((1, 1), 0.7, dtype=torch.float64)

    def both(name: str, over: Any, virtual: bool) -> dict[str, torch.Tensor]:
        fn, varies = COLLECTIVES[name]
        mesh = Mesh({"x": world, "y": 1}, virtual=virtual)
        run = shard_map(
            lambda x, w: fn(torchard, over, torch.tanh(x * w), w).sin(),
            mesh, (P("x", "y"), P()), P("x" if varies else None, "y"),
        )  # fmt: skip

        def loss(x: torch.Tensor, w: torch.Tensor) -> Any:
            out = run(x, w)
            whole = out.full()
            return whole.square().sum(), whole

        grads, out = torch.func.grad(loss, (0, 1), has_aux=True)(x, w)
        return {"x": grads[0], "w": grads[1], "out": out}

    names = (
        *("psum", "pmax", "all_gather 1", "all_gather invariant", "psum_scatter tiled"),
        *("all_to_all", "all_to_all one dim", "ppermute", "axis_index"),
    )
    overs = itertools.cycle(("x", ("x", "y")))
    pairs = list(zip(names, overs, strict=False))
    return {name: worst(both(name, over, False), both(name, over, True)) for name, over in pairs}


@check
def some_axes_manual(rank: int, world: int) -> list[float]:
    """Tensor parallel by hand in a batch that is split by itself, each alone, against one device."""
    seed = torch.Generator().manual_seed(7)
    w = torch.randn(4, 6, dtype=torch.float64, generator=seed)
    x = torch.randn(5, 4, dtype=torch.float64, generator=seed)

    def results(forward: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            out = forward(w, x)
            return out.square().sum(), out

        grads, out = torch.func.grad(loss, (0, 1), has_aux=True)(w, x)
        return {"w": grads[0], "x": grads[1], "out": out}

    def on(mesh: Mesh) -> Callable[..., torch.Tensor]:
        mapped = shard_map(
            lambda w, x: torchard.psum(torch.tanh(x @ w) @ w.T, "tp"),
            mesh, (P(None, "tp"), P()), P(), axis_names={"tp"},
        )  # fmt: skip
        return lambda w, x: mapped(place(w, mesh, P(None, "tp")), place(x, mesh, P("dp"))).full()

    want = results(lambda w, x: torch.tanh(x @ w) @ w.T)
    shapes = ({"dp": world, "tp": 1}, {"dp": 1, "tp": world})
    return [worst(results(on(Mesh(axes))), want) for axes in shapes]


def message(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@check
def mesh_of_another_size(rank: int, world: int) -> str:
    return message(lambda: Mesh({"tp": world + 1}))


@check
def meshes_that_are_refused(rank: int, world: int) -> list[str]:
    """Pickled, of a DeviceMesh without names, and of one without this rank (rank 0 is in it)."""
    unnamed = init_device_mesh("cpu", (world,))
    first = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    said = [message(lambda: pickle.dumps(Mesh({"tp": world}))), message(lambda: Mesh(unnamed))]
    return [*said, message(lambda: Mesh(first)) if rank else ""]


@check
def threads_that_differ(rank: int, world: int) -> list[str]:
    """One rank places a value, and then runs a plan, in a thread."""
    mesh = Mesh({"tp": world})
    run = shard(lambda x: x.sum(), mesh, out_specs=P())
    x = place(torch.arange(6.0), mesh, P("tp"))
    assert float(run(x)) == float(run(x)) == 15.0
    said = []
    for call in (lambda: place(torch.ones(3), mesh, P("tp")), lambda: run(x)):
        if rank == 0:
            said.append(message(call))
        else:
            with ThreadPoolExecutor(1, "beside") as pool:
                said.append(pool.submit(message, call).result())
    return said


@check
def replicas_that_differ(rank: int, world: int) -> str:
    run = shard(lambda x, y: x * y, Mesh({"tp": world}))
    return message(lambda: run(torch.ones(3), torch.ones(3) * rank))


@check
def closed_over_replicas_that_differ(rank: int, world: int) -> str:
    scale = torch.ones(3) * rank
    return message(lambda: shard(lambda x: x * scale, Mesh({"tp": world}))(torch.ones(3)))


@check
def calls_that_differ(rank: int, world: int) -> str:
    mesh = Mesh({"tp": world})
    x = place(torch.arange(6.0), mesh, P("tp"))
    return message(x.full if rank == 0 else lambda: place(torch.ones(3), mesh, P("tp")))


@check
def placed_replicas_that_differ(rank: int, world: int) -> str:
    mesh = Mesh({"tp": world})
    return message(lambda: place({"w": torch.ones(4) * rank}, mesh, P("tp")))


@check
def placed_replicas_of_other_kinds(rank: int, world: int) -> list[str]:
    """Of the same bytes but another shape or dtype, and a tree with one leaf more."""
    mesh, zeros = Mesh({"tp": world}), torch.zeros(2, 3)
    trees = [
        {"w": zeros.t() if rank else zeros},
        {"w": zeros.int() if rank else zeros},
        {"w": zeros} | ({"more": zeros} if rank else {}),
    ]
    return [message(lambda tree=tree: place(tree, mesh, P())) for tree in trees]  # type: ignore[misc]


@check
def specs_that_differ(rank: int, world: int) -> list[str]:
    mesh, x = Mesh({"tp": world}), torch.arange(36.0).reshape(6, 6)
    spec = P(None, "tp") if rank else P("tp")
    placed = place(x, mesh, spec)
    run = shard(lambda x: x.exp().sum(), mesh)
    hinted = shard(lambda x: x.exp().sum(), mesh, in_specs=(spec,))
    return [message(lambda: run(placed)), message(lambda: hinted(x))]


@check
def one_rank_gathers_alone(rank: int, world: int) -> str:
    """Rank 0 prints what the others do not: it is told, not left hanging."""
    mesh = Mesh({"tp": world}, timeout=3.0)
    dist.barrier()  # however far apart they are, they come to place together
    value = place(torch.arange(6.0), mesh, P("tp"))
    said = message(value.full) if rank == 0 else "no error"
    exchange_once_more(rank)
    return said


def exchange_once_more(rank: int) -> None:
    """The others catch up with the turn that rank 0 spent."""
    if rank:
        next(exchange_module._turns)


@check
def plans_that_differ(rank: int, world: int) -> str:
    run = shard(lambda x: x * 2, Mesh({"tp": world}))
    return message(lambda: run(torch.ones(3 + rank)))


@check
def one_rank_retraces_alone(rank: int, world: int) -> str:
    """Rank 0 has a new shape, the others a cached plan: rank 0 says so instead of hanging."""
    mesh = Mesh({"tp": world}, timeout=3.0)
    run = shard(lambda x: x * 2, mesh)
    dist.barrier()
    run(torch.ones(3))
    return message(lambda: run(torch.ones(4 if rank == 0 else 3)))


def found_by(rank: int, world: int) -> dict[str, Any]:
    """What one rank finds in all checks."""
    found = {}
    left_out = ON_THREE if world == 2 else ON_TWO
    for name in [name for name in CHECKS if name not in left_out]:
        try:
            print(f"rank {rank}: {name}", file=sys.stderr, flush=True)  # if it hangs: where
            found[name] = CHECKS[name](rank, world)
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    print_found(found_by)
