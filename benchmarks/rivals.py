"""A training step with AdamW on two gloo ranks, beside what PyTorch has for the same plan.

    python benchmarks/rivals.py                          all of them; the table is saved in results/
    python benchmarks/rivals.py --kinds dp --widths 64   one of them, nothing saved
    python benchmarks/rivals.py --quick                  the smallest width, few rounds, nothing saved

dp is data parallel (DistributedDataParallel), fsdp fully sharded (FSDP2), tp tensor parallel
(parallelize_module), pp a 1F1B pipeline of four microbatches (Schedule1F1B). PyTorch's have its fused
AdamW; torchard's run by themselves ("plain"), or in a jit that donates parameters and state.

Each is first alone in processes of its own, where its losses are compared with one process's, and
measured are the seconds of the first call, the peak of resident memory, all of the process included, and
the bytes that the kernel's TCP_INFO counts on all sockets of a rank in a step, beside those of
`.collectives` (a pipeline's are the sends of all ranks together). Then all of a kind are timed in one
process, A-B-B-A, each with a barrier before it; a step takes as long as on its slowest rank, and ratios
are of rounds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench import RESULTS, aligned, machine
from gpt import BATCH, GPT, LAYERS, LENGTH, batch
from plans import BATCHES, DECAY, MICROBATCHES, RATE, SPLIT, Plan, PlannedStep, Size
from timing import Timing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
WARMUP, COUNTED = 3, 8
ROUNDS = {64: 20, 256: 10, 512: 6}

Step = Callable[[int], float | None]
"""A training step on the batch of a number; its loss, where the rank has it."""


def module(width: int) -> GPT:
    torch.manual_seed(0)
    return GPT(width)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, RATE, weight_decay=DECAY, fused=True)


# -- PyTorch ----------------------------------------------------------------------------------------


def trained(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rows: slice) -> Step:
    def step(number: int) -> float:
        x, y = batch(number % BATCHES)
        loss = model(x[rows], y[rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())

    return step


def own_rows() -> slice:
    each = batch()[0].shape[0] // RANKS
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def ddp(width: int) -> Step:
    model = DistributedDataParallel(module(width))
    return trained(model, [adamw(model.parameters())], own_rows())


def fsdp2(width: int) -> Step:
    model, mesh = module(width), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, [adamw(model.parameters())], own_rows())


def by_parallelize_module(width: int) -> Step:
    model, kinds = module(width), {"out": ColwiseParallel, "in": RowwiseParallel}
    plan = {f"blocks.*.{name}": kinds[dim]() for name, dim in SPLIT.items()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    # A fused optimizer does not take split and plain parameters together.
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p in model.parameters():
        parts[isinstance(p, DTensor)].append(p)
    return trained(model, [adamw(part) for part in parts], slice(None))


class Stage(nn.Module):
    """The blocks of a rank: of the first, after the embedding; of the last, before the head."""

    def __init__(self, whole: GPT, rank: int) -> None:
        super().__init__()
        each = LAYERS // RANKS
        self.blocks = whole.blocks[rank * each : (rank + 1) * each]
        if rank == 0:
            self.tokens, self.places = whole.tokens, whole.places
        if rank == RANKS - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def by_1f1b(width: int) -> Step:
    rank = dist.get_rank()
    model = Stage(module(width), rank)
    optimizer = adamw(model.parameters())
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))

    def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(number: int) -> float | None:
        x, y = batch(number % BATCHES)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    return step


# -- torchard ---------------------------------------------------------------------------------------


def by_torchard(kind: str, width: int, jitted: bool) -> PlannedStep:
    """A step of a kind, by itself or in a jit."""
    plan = Plan(Size(width, BATCH, LENGTH), ((kind, RANKS),), "1f1b" if kind == "pp" else "")
    return PlannedStep(plan, jitted=jitted)


RIVALS: dict[str, tuple[str, Callable[[int], Step]]] = {
    "dp": ("DistributedDataParallel", ddp),
    "fsdp": ("FSDP2", fsdp2),
    "tp": ("parallelize_module", by_parallelize_module),
    "pp": ("Schedule1F1B", by_1f1b),
}


def makers(kind: str, width: int) -> dict[str, Callable[[], Step]]:
    """The rival, then torchard's, by name."""
    name, make = RIVALS[kind]
    return {
        name: lambda: make(width),
        "torchard, plain": lambda: by_torchard(kind, width, jitted=False),
        "torchard, jit": lambda: by_torchard(kind, width, jitted=True),
    }


# -- what a process measures of itself --------------------------------------------------------------


def peak() -> int:
    """The peak of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def bytes_sent() -> int:
    """What this process has sent on its open TCP sockets, by the kernel's count."""
    return sum(_sent(each) for each in _sockets())


def _sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    yield opened
        except OSError:  # closed since it was listed
            continue


def _sent(opened: socket.socket) -> int:
    """`tcpi_bytes_sent` of linux/tcp.h."""
    if opened.type != socket.SOCK_STREAM or opened.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("Q", info, 200)[0])


def alone(kind: str, width: int, name: str) -> list[str]:
    """A row: what one implementation takes in processes of its own; its losses are checked."""
    step = makers(kind, width)[name]()
    began = time.perf_counter()
    losses = [step(0)]
    first = time.perf_counter() - began
    losses += [step(number) for number in range(1, WARMUP)]
    sent = bytes_sent()
    for number in range(WARMUP, WARMUP + COUNTED):
        losses.append(step(number))
    sent = (bytes_sent() - sent) // COUNTED
    planned = step.planned_bytes() if isinstance(step, PlannedStep) else None
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (first, peak(), sent, losses))
    firsts, peaks, _, of_ranks = zip(*found, strict=True)
    error = _error(of_ranks, width, split=kind in ("dp", "fsdp") and planned is None)
    wire = "–".join(f"{s / 1e6:.3f}" for s in sorted({s for _, _, s, _ in found}))
    plan = "" if planned is None else f"{planned / 1e6:.3f}"
    return [name, f"{max(firsts):.2f}", f"{max(peaks) / 1e6:.0f}", wire, plan, f"{error:.0e}"]


def _error(of_ranks: Sequence[Sequence[float | None]], width: int, split: bool) -> float:
    """The largest error of a loss, where `split` ranks have the losses of their rows."""
    model = module(width)
    step = trained(model, [adamw(model.parameters())], slice(None))
    worst = 0.0
    for number, each in enumerate(zip(*of_ranks, strict=True)):
        known = [loss for loss in each if loss is not None]
        mine = [statistics.mean(known)] if split else known
        want = step(number)
        assert want is not None
        worst = max(worst, *(abs(loss - want) for loss in mine))
    if not worst < 1e-3:
        raise AssertionError(f"not the losses of one process: {worst:.1e}")
    return worst


def in_turns(steps: dict[str, Step], rounds: int) -> list[Timing]:
    """The seconds of each in each round, of both its turns."""
    took = torch.zeros(len(steps), 2 * rounds, dtype=torch.float64)
    for turn in range(2 * rounds):
        order = list(enumerate(steps.values()))
        for row, step in order if turn % 2 == 0 else reversed(order):
            dist.barrier()
            began = time.perf_counter()
            step(turn)
            took[row, turn] = time.perf_counter() - began
    dist.all_reduce(took, dist.ReduceOp.MAX)
    means = took.unflatten(1, (rounds, 2)).mean(2).tolist()
    return [Timing(name, row) for name, row in zip(steps, means, strict=True)]


def timed(kind: str, width: int, rounds: int) -> list[list[str]]:
    """The medians of a kind's steps, and their ratios to the rival's, with quartiles."""
    steps = {name: make() for name, make in makers(kind, width).items()}
    for step in steps.values():
        for number in range(WARMUP):
            step(number)
    timings, rows = in_turns(steps, rounds), []
    for timing in timings:
        low, high = timing.quartiles
        least, most = timing.quartiles_of_times(timings[0])
        median, ratio = f"{1e3 * timing.median:.1f}", f"{timing.times(timings[0]):.2f}"
        rows.append([median, f"{1e3 * low:.1f}–{1e3 * high:.1f}", ratio, f"{least:.2f}–{most:.2f}"])
    return rows


# -- the run ----------------------------------------------------------------------------------------


def work(
    rank: int, meeting: str, ranks: int, measure: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run one rank of a measurement, whose result the first one writes."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = measure(*args)
    if rank == 0:
        torch.save(result, meeting + ".result")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(measure: Callable[..., Any], *args: Any, ranks: int = RANKS) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (f"{folder}/meeting", ranks, measure, args), ranks)
        return torch.load(f"{folder}/meeting.result", weights_only=False)


def table(kind: str, width: int, rounds: int) -> str:
    mine = [on_ranks(alone, kind, width, name) for name in makers(kind, width)]
    times = on_ranks(timed, kind, width, rounds)
    head = ["", "ms", "quartiles", "ratio", "quartiles", "first s", "peak MB", "sent MB", "plan MB"]
    rows = [[row[0], *time, *row[1:]] for row, time in zip(mine, times, strict=True)]
    return f"{kind}, width {width}, {rounds} rounds\n" + aligned([[*head, "error"], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest width, few rounds")
    parser.add_argument("--kinds", nargs="*", choices=RIVALS, default=tuple(RIVALS))
    parser.add_argument("--widths", type=int, nargs="*", default=tuple(ROUNDS))
    parser.add_argument("--rounds", type=int, help="how often all are timed, twice each")
    options = parser.parse_args()
    widths = (64,) if options.quick else options.widths
    texts = [machine(), ""]
    for kind in options.kinds:
        for width in widths:
            print(f"{kind}, width {width}", flush=True)
            rounds = options.rounds or (3 if options.quick else ROUNDS.get(width, 6))
            texts += [table(kind, width, rounds), ""]
    text = "\n".join(texts)
    print(text)
    if len(options.kinds) == len(RIVALS) and tuple(widths) == tuple(ROUNDS):
        RESULTS.mkdir(exist_ok=True)
        name = f"{datetime.date.today()}-rivals-torch-{torch.__version__.split('+')[0]}.txt"
        (RESULTS / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
