"""Train a byte-level language model on real English, on any mesh; the model knows nothing of it.

    torchrun --nproc-per-node 2 examples/train_bytes.py --mesh tp=2
    torchrun --nproc-per-node 2 examples/train_bytes.py --mesh dp=2
    python examples/train_bytes.py --virtual dp=2,tp=4

One function, `step`, is written for one device. `specs` says which axis of the mesh splits which
dimension of which parameter (Megatron's way: columns up, rows down); everything else, the collectives
first of all, follows from that. In the end the same function is trained again on one device.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _job
import torch
from _model import Params, Size, generate, init, loss
from _text import batch_at, load, windows
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from torchard import Mesh, MeshTensor, P, jit, optim, place, random, shard

Step = Callable[[Params, Any, Tensor], tuple[Params, Any, Tensor]]


def make_step(optimizer: optim.Optimizer) -> Step:
    """One step of training on one device: a pure function."""

    def step(params: Params, state: Any, batch: Tensor) -> tuple[Params, Any, Tensor]:
        grads, value = torch.func.grad_and_value(loss)(params, batch)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    return step


def specs(mesh: Mesh, size: Size) -> Any:
    """Which mesh axis splits which dimension of each parameter."""
    tp = "tp" if "tp" in mesh.axes else None
    up, down = {"w": P(tp, None), "b": P(tp)}, {"w": P(None, tp), "b": P()}
    block = {"up": up, "down": down}
    return {"embed": P(), "blocks": [block] * size.blocks, "out": {"w": P(), "b": P()}}


@dataclass
class Curve:
    """What a run showed: losses in nats per byte, and training bytes per second."""

    losses: list[float] = field(default_factory=list)
    rate: float = 0.0


@dataclass(frozen=True)
class Task:
    """What is trained on what; equal for the sharded run and the one on one device."""

    options: argparse.Namespace
    size: Size
    train: Tensor
    held_out: Tensor
    key: Tensor
    optimizer: optim.Optimizer

    @classmethod
    def of(cls, options: argparse.Namespace) -> Task:
        train, held_out = load()
        schedule = optim.warmup_cosine(options.lr, options.steps, options.steps // 10)
        size = Size(hidden=options.hidden)
        return cls(
            options,
            size,
            train,
            held_out,
            random.key(options.seed),
            optim.adamw(schedule, weight_decay=options.decay),
        )

    def init(self) -> Params:
        return init(random.fold_in(self.key, 0), self.size)

    def batches(self) -> Iterator[Tensor]:
        key, size = random.fold_in(self.key, 1), self.options.batch
        for number in range(self.options.steps):
            yield batch_at(self.train, key, number, size, self.size.context)

    def validation(self) -> Tensor:
        """Windows spread evenly over the held-out text."""
        last = len(self.held_out) - self.size.context - 1
        starts = torch.linspace(0, last, self.options.validate).long()
        return windows(self.held_out, starts, self.size.context)


def train(
    step: Step,
    params: Params,
    state: Any,
    batches: Iterator[Tensor],
    task: Task,
    here: _job.Job,
    title: str,
) -> tuple[Params, Curve]:
    """Run every batch through `step`, with a progress bar on the leading rank."""
    curve, count = Curve(), task.options.steps
    with tqdm(batches, title, count, disable=not here.leads, unit="step", mininterval=0.5) as bar:
        for number, batch in enumerate(bar):
            here.doing = f"step {number + 1} of {count}"
            misbehave(task.options, here.rank, number)
            params, state, value = step(params, state, batch)
            curve.losses.append(float(value))
            if number == 0:
                began = time.perf_counter()  # the first step traces and plans
            elif here.leads:
                curve.rate = number * task.options.batch / (time.perf_counter() - began)
                bar.set_postfix_str(f"loss {curve.losses[-1]:.3f}, {curve.rate:,.0f} bytes/s")
    return params, curve


def misbehave(options: argparse.Namespace, rank: int, number: int) -> None:
    """What the tests of the endings ask for: one rank comes to grief."""
    if (rank, number) != (options.fail_rank, options.fail_at):
        return
    if options.fail == "raise":
        raise ValueError("asked to fail")
    if options.fail in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[options.fail])


def sharded(task: Task, mesh: Mesh, here: _job.Job) -> tuple[Params, Curve, float]:
    """Train on the mesh: the parameters gathered, the curve, the loss on held-out text."""
    where = specs(mesh, task.size)
    rows = P("dp") if "dp" in mesh.axes else P()
    step = make_step(task.optimizer)
    run = jit(
        shard(step, mesh, out_specs=(where, None, P())),
        backend=task.options.backend,
        donate_argnums=(0, 1),
    )
    here.doing, here.awaited = "planning", "its plan"
    params = place(task.init(), mesh, where)
    state = task.optimizer.init(params)  # placed as the parameters are
    batches = (place(batch, mesh, rows) for batch in task.batches())

    plan = run.lower(params, state, place(next(task.batches()), mesh, rows)).collectives
    here.awaited = f"its part of a step's collectives ({counted(plan)})"
    if here.leads:
        print(f"What one step sends over {mesh}:\n\n{plan}\n", flush=True)
    params, curve = train(run, params, state, batches, task, here, str(mesh))

    here.doing = "validation"
    held_out = shard(loss, mesh, out_specs=P())(params, place(task.validation(), mesh, rows))
    here.awaited = "its shards of the parameters"
    return gathered(params), curve, float(held_out)


def counted(plan: Any) -> str:
    """A plan in a few words: "7 all_reduce over tp"."""
    kinds = Counter((c.kind, "·".join(c.axes)) for c in plan)
    return ", ".join(f"{n} {kind} over {axes}" for (kind, axes), n in kinds.items()) or "none"


def gathered(params: Any) -> Any:
    """The same tree of whole tensors."""
    if isinstance(params, dict):
        return {name: gathered(value) for name, value in params.items()}
    if isinstance(params, list):
        return [gathered(value) for value in params]
    return params.full() if isinstance(params, MeshTensor) else params


def one_device(task: Task, here: _job.Job) -> Curve:
    """The same run, plain torch in this process alone."""
    params = task.init()
    step = make_step(task.optimizer)
    state = task.optimizer.init(params)
    return train(step, params, state, task.batches(), task, here, "one device")[1]


def draw(path: Path, curves: dict[str, Curve], held_out: float) -> None:
    """Loss curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (title, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(curve.losses, style, label=title)
    axes.axhline(held_out, color="gray", linestyle=":", label="held-out text")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def readable(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def report(
    task: Task, params: Params, sharded_curve: Curve, held_out: float, here: _job.Job, mesh: Mesh
) -> None:
    """What came of it: held-out loss, a continuation, the comparison with one device, a picture."""
    start = bytes(task.held_out[1000 : 1000 + task.size.context].tolist())
    more = generate(params, random.fold_in(task.key, 2), start, task.options.sample)
    bits = held_out / torch.log(torch.tensor(2.0)).item()
    print(f"\nheld-out text: loss {held_out:.4f}, {bits:.3f} bits per byte")
    print(f"\n{readable(start)}|{readable(more)}\n", flush=True)

    alone = one_device(task, here)
    ours, theirs = sharded_curve.losses[-1], alone.losses[-1]
    axes = "-".join(f"{name}{size}" for name, size in mesh.shape.items())
    path = task.options.out / f"loss-{'virtual-' if mesh.virtual else ''}{axes}.png"
    draw(path, {str(mesh): sharded_curve, "one device": alone}, held_out)
    print(
        f"\nloss after {task.options.steps} steps: sharded {ours:.5f}, one device {theirs:.5f} "
        f"(difference {abs(ours - theirs):.1e})\ncurves: {path}",
        flush=True,
    )


def axes_of(text: str) -> dict[str, int]:
    """``"dp=2,tp=4"`` as a mesh's axes."""
    try:
        return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form dp=2,tp=4") from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    about, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=about)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", type=axes_of, help="axes over torchrun's processes: dp=2,tp=1")
    where.add_argument("--virtual", type=axes_of, help="axes over ranks inside this process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="windows in a step")
    parser.add_argument("--hidden", type=int, default=Size.hidden, help="width of the MLPs")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=1e-2, help="of weights, in AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", type=int, default=4096, help="windows of held-out text")
    parser.add_argument("--sample", type=int, default=240, help="bytes to go on with")
    parser.add_argument("--backend", default="eager", help="of jit; inductor compiles first")
    # More threads than free cores cost far more than they bring: torch's threads spin while waiting.
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for a rank")
    parser.add_argument("--out", type=Path, default=Path("out"))
    # Only for the tests of what happens then.
    quiet = argparse.SUPPRESS
    parser.add_argument("--fail", choices=("raise", "kill", "stop", "replan"), help=quiet)
    parser.add_argument("--fail-rank", type=int, default=1, help=quiet)
    parser.add_argument("--fail-at", type=int, default=5, help=quiet)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    with _job.job("train_bytes", options.timeout) as here:
        if options.virtual:
            mesh = Mesh(options.virtual, virtual=True)
        else:
            mesh = Mesh(options.mesh, timeout=options.timeout)
        if options.fail == "replan" and here.rank == options.fail_rank:
            options.decay *= 2
        task = Task.of(options)
        params, curve, held_out = sharded(task, mesh, here)
        if here.leads:
            here.awaited = "nobody"
            report(task, params, curve, held_out, here, mesh)


if __name__ == "__main__":
    main()
