"""Planned memory: blocks beside their bounds and beside allocators, allocations and time per step.

    python benchmarks/planned_memory.py            all tables; added to a file in results/
    python benchmarks/planned_memory.py --quick    smaller models, few rounds, nothing saved
    python benchmarks/planned_memory.py --only blocks steps times resident ranks

Every planned program is compared with the same program in allocated memory, bit for bit, before anything
is measured. ``blocks`` needs no run, except for Inductor: its peaks are those of the profiler's memory
events within steady steps, beyond the arguments, with and without donation.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import RESULTS, aligned, machine
from blocks import gpt, mlp, train_gpt
from images import unet
from timing import in_turns
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile
from workload import Rival

from torchard import (
    Mesh,
    P,
    checkpoint,
    functionalize,
    jit,
    nn,
    optim,
    place,
    policies,
    random,
    shard,
    tree,
)

KB = 1024
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """A training step ``fn(params, state, batch)``, and values for it."""

    name: str
    fn: Callable[..., Any]
    values: tuple[Any, ...]

    def jitted(self, donates: bool = True, **options: Any) -> Any:
        return jit(self.fn, donate_argnums=(0, 1) if donates else (), **options)

    def copies(self) -> tuple[Any, ...]:
        """Parameters and state that may be donated, and the batch."""
        params, state, batch = self.values
        return *tree.map(lambda x: x.clone(), (params, state)), batch


def trained(name: str, loss: Loss, params: Any, batch: Any) -> Step:
    """A step of AdamW."""
    optimizer = optim.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, batch)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    return Step(name, step, (params, optimizer.init(params), batch))


# -- programs ---------------------------------------------------------------------------------------


def experts(params: Any, batch: Tensor) -> Tensor:
    """Layers of eight experts, of which each token has two; tokens are weighted, none is dropped."""
    x = batch
    for p in params:
        weights, chosen = torch.topk((x @ p["router"]).softmax(-1), 2)
        gates = torch.zeros_like(x @ p["router"]).scatter(-1, chosen, weights)
        hidden = torch.einsum("btd,edh->beth", x, p["up"]).relu()
        x = x + torch.einsum("beth,ehd,bte->btd", hidden, p["down"], gates)
    return x.square().mean()


def llama(width: int, rows: int) -> tuple[Loss, Any, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=128)).train()
    fn, params = functionalize(model)
    ids = random.randint(random.key(1), (rows, 64), 0, 512)

    def loss(params: Any, ids: Tensor) -> Tensor:
        value: Tensor = fn(params, input_ids=ids, labels=ids, use_cache=False).loss
        return value

    return loss, params, ids


def programs(quick: bool) -> Iterator[Step]:
    numbers = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=numbers)
    width = 64 if quick else 128
    model = gpt(train_gpt.Size(layers=2 if quick else 6, width=width, heads=4, context=width), 8)
    recomputing = model.make(lambda block: checkpoint(block, policy=policies.save_nothing))
    yield trained("GPT", model.loss, model.params, model.batch)
    yield trained("GPT, checkpointed", recomputing, model.params, model.batch)
    net = unet(3 if quick else 4, 64)
    weights = tree.map(lambda shape: draw(*shape.shape) / 10, net.params)
    image = draw(2, *net.image[1:])
    yield trained("U-Net", lambda p, x: net.fn(p, x, lambda v: v).square().mean(), weights, image)
    layers = [
        {"router": draw(64, 8), "up": draw(8, 64, width) / 8, "down": draw(8, width, 64) / 8}
        for _ in range(4)
    ]
    yield trained("mixture of experts", experts, layers, draw(4, 32, 64))
    yield trained("HuggingFace's Llama", *llama(width, 4))


def memory_bound(quick: bool) -> Step:
    """Element-wise operations on large tensors."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = nn.gelu(x * params["scale"] + params["shift"]) + x
        return x.square().mean()

    count = 1 << (18 if quick else 22)
    params = {"scale": torch.ones(count), "shift": torch.zeros(count)}
    return trained("element-wise", loss, params, torch.linspace(-1, 1, count))


def matmul_bound(quick: bool) -> Step:
    model = mlp(256 if quick else 512, 512, 4)
    return trained("MLP", model.loss, model.params, model.batch)


# -- tables -----------------------------------------------------------------------------------------


def allocated_within(call: Callable[[], Any]) -> tuple[int, int, Counter[str]]:
    """The peak of what a call allocates, how many allocations are larger than 1 kB, and in what."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    now = most = 0
    for size in sizes:
        now += size
        most = max(most, now)
    within: Counter[str] = Counter()
    for event in recorded.events() or ():
        if event.name != "[memory]" and event.self_cpu_memory_usage > KB:
            outer, name = event, event.name
            while (outer := outer.cpu_parent) is not None:
                name = outer.name if outer.name.startswith("aten::") else name
            within[name.removeprefix("aten::")] += 1
    return most, sum(size > KB for size in sizes), within


def running(step: Step, **options: Any) -> Callable[[], Any]:
    """Calls of a step, each on the parameters and the state that the one before returned."""
    run, values = step.jitted(**options), list(step.copies())

    def call() -> Any:
        values[:2] = run(*values)[:2]

    return call


def blocks(steps: list[Step], compiled: bool) -> str:
    """Peaks, blocks, and what allocators need."""
    head = ["program", "peak", "planned", "block", "bound", "block:bound", "caching", "in use"]
    rows = [[*head, *(["Inductor", "donated"] if compiled else [])]]
    for step in [*steps, *sharded(steps[0])]:
        memory = step.jitted(backend="eager").lower(*step.values).memory
        cells = [memory.peak, memory.planned, memory.block, memory.bound]
        row = [step.name, *map(mb, cells), f"{memory.block / memory.bound:.4f}", mb(memory.reserved)]
        row.append(f"{1 - memory.fragmentation:.2f}")
        if compiled and "ranks" not in step.name:
            row += inductor(step)
        rows.append([*row, *[""] * (len(rows[0]) - len(row))])
    return aligned(rows)


def inductor(step: Step) -> list[str]:
    """The most that Inductor's code holds beyond the arguments, without donation and with it."""
    return [mb(steady_peak(step, donates)) for donates in (False, True)]


def steady_peak(step: Step, donates: bool) -> int:
    """The peak within steady steps, beyond what is held between them.

    The profiler does not see what was allocated before it began being freed, so there is a step for that.
    """
    call = running(step, donates=donates)
    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(3):
            call()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    return max(held) - held[-1]


def sharded(step: Step) -> Iterator[Step]:
    """The step with parameters and state split over eight ranks, of which memory is that of one."""
    mesh = Mesh({"dp": 8}, virtual=True)
    specs = tree.map(lambda x: P("dp") if x.ndim else P(), step.values[:2])
    fn = shard(step.fn, mesh, in_specs=(*specs, P("dp")), out_specs=(*specs, P()))
    yield Step(f"{step.name}, fully sharded over 8 ranks", fn, step.values)


def mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def per_step(steps: list[Step], compiled: bool) -> str:
    """Allocations of a steady step, and the operations that allocate."""
    ways: list[dict[str, Any]] = [{"backend": "eager"}, {"backend": "eager", "memory": "planned"}]
    ways += [{}] if compiled else []
    rows = [["allocations > 1 kB per step", "eager", "planned", "Inductor"][: len(ways) + 1]]
    notes = []
    for step in steps:
        row = [step.name]
        for options in ways:
            call = running(step, **options)
            for _ in range(6):  # until results find memory of earlier steps
                call()
            _, count, within = allocated_within(call)
            row.append(str(count))
            if options.get("memory"):
                named = ", ".join(f"{n} × {name}" for name, n in within.most_common())
                notes.append(f"{step.name}: {named or 'none'}")
        rows.append(row)
    notes.insert(0, "in planned memory, within operations of torch that allocate results or temporaries:")
    return "\n".join([aligned(rows), *notes])


def check(step: Step) -> None:
    """Planned memory gives the same bits, over some steps."""
    one, two = step.copies(), step.copies()
    plain, planned = step.jitted(backend="eager"), step.jitted(backend="eager", memory="planned")
    for _ in range(3):
        *first, a = plain(*one)
        *second, b = planned(*two)
        one, two = (*first, one[2]), (*second, two[2])
        assert torch.equal(a, b), step.name
    for x, y in zip(tree.leaves(one[:2]), tree.leaves(two[:2]), strict=True):
        assert torch.equal(x, y), step.name


def times(steps: list[Step], compiled: bool, rounds: int) -> str:
    """Steps in turns; above 1, planned memory is faster, and for Inductor donation.

    A turn is a few steps of a training loop, so that most follow a step of the same program.
    """
    rows = [["ms per step", "eager", "planned", "ratio (quartiles)"]]
    rows[0] += ["Inductor", "donated", "ratio (quartiles)"] if compiled else []
    for step in steps:
        row = [step.name]
        eager = [{"backend": "eager", "memory": memory} for memory in ("allocated", "planned")]
        for ways in [eager, [{"donates": donates} for donates in (False, True)]][: 1 + compiled]:
            calls = [running(step, **options) for options in ways]
            count = _steps_per_turn(calls[0])
            turns = [functools.partial(_repeated, call, count) for call in calls]
            one, two = in_turns([Rival(str(i), turn, list) for i, turn in enumerate(turns)], rounds)
            low, high = one.quartiles_of_times(two)
            row += [f"{1e3 * each.median / count:.2f}" for each in (one, two)]
            row.append(f"{one.times(two):.3f} ({low:.2f}-{high:.2f})")
        rows.append(row)
    return aligned(rows)


def _steps_per_turn(call: Callable[[], Any]) -> int:
    """How many steps take 50 ms."""
    _repeated(call, 3)  # compiles
    began = time.perf_counter()
    _repeated(call, 3)
    return math.ceil(0.05 / ((time.perf_counter() - began) / 3))


def _repeated(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def resident(rounds: int) -> str:
    """Resident memory over many steps of three shapes in turn."""
    rows = [["resident after", *(f"{n} steps" for n in (rounds // 10, rounds // 2, rounds)), "reserved"]]
    from torchard.functional.memory.arena import reserved

    for memory in ("allocated", "planned"):
        models = [gpt(train_gpt.Size(layers=2, width=64, heads=4, context=n), 4) for n in (64, 128, 96)]
        calls = [
            running(trained("GPT", m.loss, m.params, m.batch), backend="eager", memory=memory)
            for m in models
        ]
        seen = []
        for i in range(rounds):
            calls[i % 3]()
            if i + 1 in (rounds // 10, rounds // 2, rounds):
                seen.append(_resident())
        held = sum(reserved().values()) if memory == "planned" else 0
        rows.append([memory, *(f"{size / 1e6:.1f} MB" for size in seen), mb(held)])
    return aligned(rows)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- two ranks --------------------------------------------------------------------------------------


def ranks(rank: int, meeting: str, width: int, rounds: int) -> None:
    """Data parallel and fully sharded steps on two ranks, with merged collectives."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, 2)
    patience = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    mesh, model = Mesh({"dp": 2}), mlp(width, 64, 8)
    step = trained("", model.loss, model.params, model.batch)
    rows = [["two gloo ranks", "allocated", "planned", "ratio", "copied", "planned"]]
    for name, spec in (("data parallel", P()), ("fully sharded", P("dp"))):
        specs = tree.map(lambda x, s=spec: s if x.ndim else P(), step.values[:2])
        fn = shard(step.fn, mesh, in_specs=(*specs, P("dp")), out_specs=(*specs, P()))
        state = tree.map(lambda x, s: place(x, mesh, s), step.values[:2], specs)
        batch = place(step.values[2], mesh, P("dp"))
        rivals = []
        for memory in ("allocated", "planned"):
            run = jit(fn, backend="eager", memory=memory)
            call = functools.partial(run, *state, batch)
            call()
            rivals.append(Rival(memory, call, list))
        one, two = in_turns(rivals, rounds)
        timed = [f"{1e3 * each.median:.2f} ms" for each in (one, two)]
        memory = jit(fn, backend="eager").lower(*state, batch).memory
        copied = [f"{size / 1e3:.1f} kB" for size in (memory.copied, memory.planned_copied)]
        rows.append([f"{name}, width {width}", *timed, f"{one.times(two):.3f}", *copied])
    if rank == 0:
        Path(f"{meeting}.table").write_text(aligned(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models, nothing saved")
    parser.add_argument("--no-compile", action="store_true", help="without Inductor")
    parser.add_argument("--only", nargs="+", default=["blocks", "steps", "times", "resident", "ranks"])
    options = parser.parse_args()
    compiled = not options.no_compile
    texts = [machine()]

    def note(text: str) -> None:
        print(f"\n{text}", flush=True)
        texts.append(text)

    steps = list(programs(options.quick))
    if {"blocks", "steps", "times"} & set(options.only):
        for step in steps:
            check(step)
    if "blocks" in options.only:
        note(blocks(steps, compiled))
    if "steps" in options.only:
        note(per_step(steps, compiled))
    if "times" in options.only:
        more = [memory_bound(options.quick), matmul_bound(options.quick)]
        note(times([*more, *steps], compiled, 7 if options.quick else 100))
    if "resident" in options.only:
        note(resident(100 if options.quick else 1000))
    if "ranks" in options.only:
        os.environ["OMP_NUM_THREADS"] = "1"
        for width in (64,) if options.quick else (64, 256, 512):
            with tempfile.TemporaryDirectory() as folder:
                meeting = f"{folder}/meeting"
                spawn(ranks, (meeting, width, 10 if options.quick else 60), nprocs=2)
                note(Path(f"{meeting}.table").read_text())
    if not options.quick:
        version = torch.__version__.partition("+")[0]
        path = RESULTS / f"{datetime.date.today()}-planned-memory-torch-{version}.txt"
        with path.open("a") as file:
            file.write("\n\n".join(texts) + "\n\n")


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)
