"""Training a byte-level language model on a mesh, and again on one device: everything but the model.

A `Model` is plain functions, independent of any mesh; a `Recipe` is specs, independent of the functions.
An example provides one of each, and `sharded` combines them.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _fail
import _job
import torch
from _text import batch_at, generate, load, windows
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

import torchard
from torchard import Mesh, MeshTensor, P, jit, optim, pipeline, place, random, shard, stage_specs

__all__ = ["Model", "Params", "Recipe", "options", "run"]

Params = dict[str, Any]
Step = Callable[[Params, Any, Tensor], tuple[Params, Any, Tensor]]


@dataclass(frozen=True)
class Model:
    """A language model over bytes: pure functions of its parameters.

    Attributes:
        context: the number of bytes that it sees.
        targets: the number of bytes that it predicts in a window of context + 1.
        init: a function of a key that returns the parameters.
        loss: a function of parameters and windows int64 [batch, context + 1] that returns the mean nats
            per predicted byte.
        predict: a function of parameters and bytes [batch, context] that returns the logits [batch, 256]
            of the next byte.
    """

    context: int
    targets: int
    init: Callable[[Tensor], Params]
    loss: Callable[[Params, Tensor], Tensor]
    predict: Callable[[Params, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a model is placed on a mesh.

    Attributes:
        specs: the specs of the parameters, a tree like theirs or a prefix of it.
        batch: the spec of the windows.
        pins: the specs of activations, by the labels that the model gave them.
        stages: the scopes of the layers that the axis "pp" puts on different ranks; None for no pipeline.
    """

    specs: Any
    batch: P = field(default_factory=P)
    pins: Mapping[str, P] = field(default_factory=dict)
    stages: str | None = None


def make_step(loss: Callable[[Params, Tensor], Tensor], optimizer: optim.Optimizer) -> Step:
    """A training step on one device, as a pure function."""

    def step(params: Params, state: Any, batch: Tensor) -> tuple[Params, Any, Tensor]:
        grads, value = torch.func.grad_and_value(loss)(params, batch)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    return step


@dataclass
class Curve:
    """The losses of a run in nats per byte, from step `first` on, and its training bytes per second."""

    first: int = 0
    losses: list[float] = field(default_factory=list)
    rate: float = 0.0


@dataclass(frozen=True)
class Task:
    """The model, data and optimizer, the same for the sharded run and the run on one device."""

    options: argparse.Namespace
    model: Model
    train: Tensor
    held_out: Tensor
    key: Tensor
    optimizer: optim.Optimizer

    @classmethod
    def of(cls, options: argparse.Namespace, model: Model) -> Task:
        train, held_out = load()
        schedule = optim.warmup_cosine(options.lr, options.steps, options.steps // 10)
        optimizer = optim.adamw(schedule, weight_decay=options.decay)
        return cls(options, model, train, held_out, random.key(options.seed), optimizer)

    def init(self) -> Params:
        return self.model.init(random.fold_in(self.key, 0))

    def batches(self, first: int = 0) -> Iterator[Tensor]:
        """The batches of the steps from `first` on, which depend only on the key and the step."""
        key, size = random.fold_in(self.key, 1), self.options.batch
        for number in range(first, self.options.steps):
            yield batch_at(self.train, key, number, size, self.model.context)

    def validation(self) -> Tensor:
        """Windows spread evenly over the held-out text."""
        last = len(self.held_out) - self.model.context - 1
        starts = torch.linspace(0, last, self.options.validate).long()
        return windows(self.held_out, starts, self.model.context)


def train(
    step: Step,
    params: Params,
    state: Any,
    batches: Iterator[Tensor],
    task: Task,
    here: _job.Job,
    title: str,
    first: int = 0,
    keep: Callable[[int, Params, Any], None] = lambda number, params, state: None,
) -> tuple[Params, Curve]:
    """Run every batch through `step`, with a progress bar on the leading rank.

    `keep` is called after each step with the total number of steps taken.
    """
    curve, count = Curve(first), task.options.steps
    work = task.options.batch * task.model.targets
    with tqdm(
        *(batches, title, count),
        **{"initial": first, "disable": not here.leads, "unit": "step", "mininterval": 0.5},
    ) as bar:
        for number, batch in enumerate(bar, first):
            here.doing = f"step {number + 1} of {count}"
            with _fail.misbehaving(task.options, here.rank, number):
                params, state, value = step(params, state, batch)
            curve.losses.append(float(value))
            if number == first:
                began = time.perf_counter()  # the first step traces and plans
            elif here.leads:
                curve.rate = (number - first) * work / (time.perf_counter() - began)
                bar.set_postfix_str(f"loss {curve.losses[-1]:.3f}, {curve.rate:,.0f} bytes/s")
            keep(number + 1, params, state)
    return params, curve


def sharded(task: Task, recipe: Recipe, mesh: Mesh, here: _job.Job) -> tuple[Params, Curve, float]:
    """Train on the mesh; the gathered parameters, the curve, and the loss on held-out text."""
    step = cut(make_step(task.model.loss, task.optimizer), (None, None, 0), task, recipe, mesh)
    here.doing, here.awaited = "planning", "its plan"
    params, specs = task.init(), recipe.specs
    if recipe.stages is not None:
        example = place(next(task.batches()), mesh, recipe.batch)
        specs = stage_specs(step, params, task.optimizer.init(params), example, specs=specs)
    run = jit(
        shard(
            step,
            mesh,
            out_specs=(specs, optim.AdamState(P(), specs, specs), P()),
            constrain_at=recipe.pins,
        ),
        backend=task.options.backend,
        donate_argnums=(0, 1),
    )
    params = place(params, mesh, specs)
    state = task.optimizer.init(params)  # placed as the parameters are
    params, state, first = resumed(task.options, params, state)
    batches = (place(batch, mesh, recipe.batch) for batch in task.batches(first))

    example = place(next(task.batches()), mesh, recipe.batch)
    program = run.lower(params, state, example)
    plan = program.collectives
    here.awaited = f"its part of a step's collectives ({counted(plan)})"
    if here.leads:
        print(f"What one step sends over {mesh}:\n\n{plan}\n", flush=True)
        if recipe.stages is not None:
            print(f"{program.schedule}\n", flush=True)

    def keep(number: int, params: Params, state: Any) -> None:
        if is_kept(task.options, number):
            here.doing = f"saving step {number}"
            tree = {"params": params, "state": state, "step": number}
            torchard.save(
                task.options.save / f"step-{number}", tree, timeout=task.options.timeout
            )

    params, curve = train(run, params, state, batches, task, here, str(mesh), first, keep)

    here.doing = "validation"
    loss = cut(task.model.loss, (None, 0), task, recipe, mesh)
    evaluate = shard(loss, mesh, out_specs=P(), constrain_at=recipe.pins)
    held_out = evaluate(params, place(task.validation(), mesh, recipe.batch))
    here.awaited = "its shards of the parameters"
    return gathered(params), curve, float(held_out)


def cut(
    fn: Callable[..., Any], batch: tuple[int | None, ...], task: Task, recipe: Recipe, mesh: Mesh
) -> Callable[..., Any]:
    """The function itself, or its layers on the stages of the mesh, as the recipe says."""
    if recipe.stages is None:
        return fn
    return pipeline(
        fn,
        mesh,
        "pp",
        stages=recipe.stages,
        microbatches=task.options.microbatches,
        batch=batch,
        schedule=task.options.schedule,
    )


def is_kept(options: argparse.Namespace, number: int) -> bool:
    """Whether to save a checkpoint after this many steps: every `save_every` steps, and at the end."""
    return bool(options.save) and (number % options.save_every == 0 or number == options.steps)


def resumed(options: argparse.Namespace, params: Params, state: Any) -> tuple[Params, Any, int]:
    """The values and the step to start from: those given, or the last checkpoint's, from any mesh.

    If checkpoints are also saved there, the job may be the first attempt, which finds none, or one that
    was started again after its last step.
    """
    if options.resume is None:
        return params, state, 0
    checkpoints = {int(path.name[5:]): path for path in options.resume.glob("step-*[0-9]")}
    last, restarts = max(checkpoints, default=0), options.resume == options.save
    if not last and restarts:
        return params, state, 0
    if not last or last > options.steps - (not restarts):
        problem = f"is of step {last}, and --steps is {options.steps}" if last else "does not exist"
        raise ValueError(
            f"the last checkpoint in {options.resume} {problem}: there is nothing to resume"
        )
    tree = {"params": params, "state": state, "step": last}
    tree = torchard.load(checkpoints[last], tree, timeout=options.timeout)
    return tree["params"], tree["state"], tree["step"]


def counted(plan: Any) -> str:
    """A summary of a plan: "7 all_reduce over tp"."""
    kinds = Counter((c.kind, "·".join(c.axes)) for c in plan)
    return ", ".join(f"{n} {kind} over {axes}" for (kind, axes), n in kinds.items()) or "none"


def gathered(params: Any) -> Any:
    """The tree with its placed values gathered."""
    if isinstance(params, dict):
        return {name: gathered(value) for name, value in params.items()}
    if isinstance(params, list):
        return [gathered(value) for value in params]
    return params.full() if isinstance(params, MeshTensor) else params


def one_device(task: Task, here: _job.Job) -> tuple[Curve, float]:
    """The same run in plain torch, in this process alone."""
    params = task.init()
    step = make_step(task.model.loss, task.optimizer)
    state = task.optimizer.init(params)
    params, curve = train(step, params, state, task.batches(), task, here, "one device")
    return curve, float(task.model.loss(params, task.validation()))


def draw(path: Path, curves: dict[str, Curve], held_out: float) -> None:
    """Save a picture of the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (title, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        steps = range(curve.first, curve.first + len(curve.losses))
        axes.plot(steps, curve.losses, style, label=title)
    axes.axhline(held_out, color="gray", linestyle=":", label="held-out text")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def readable(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def report(
    task: Task, params: Params, sharded_curve: Curve, held_out: float, here: _job.Job, mesh: Mesh
) -> None:
    """Print the held-out loss, generated text and a comparison with one device; save a picture."""
    start = bytes(task.held_out[1000 : 1000 + task.model.context].tolist())
    key = random.fold_in(task.key, 2)
    generated = generate(task.model.predict, params, key, start, task.options.sample)
    bits = held_out / torch.log(torch.tensor(2.0)).item()
    print(f"\nheld-out text: loss {held_out:.4f}, {bits:.3f} bits per byte")
    print(f"\n{readable(start)}|{readable(generated)}\n", flush=True)

    alone, held_out_alone = one_device(task, here)
    path = task.options.out / f"loss-{stem(task.options)}.png"
    draw(path, {str(mesh): sharded_curve, "one device": alone}, held_out)
    after = f"after {task.options.steps} steps"
    last = compared(sharded_curve.losses[-1], alone.losses[-1]) if sharded_curve.losses else "done before"
    print(
        f"\nloss {after}: {last}\n"
        f"on held-out text: {compared(held_out, held_out_alone)}\ncurves: {path}",
        flush=True,
    )


def compared(ours: float, theirs: float) -> str:
    return f"sharded {ours:.5f}, one device {theirs:.5f} (difference {abs(ours - theirs):.1e})"


def stem(options: argparse.Namespace) -> str:
    """The part of file names that identifies a run: "fsdp-dp2", "virtual-dp2-tp4"."""
    plan = [options.plan] if "plan" in options else []
    kind = ["virtual"] if options.virtual else []
    axes = [f"{name}{size}" for name, size in (options.virtual or options.mesh).items()]
    return "-".join([*plan, *kind, *axes])


def axes_of(text: str) -> dict[str, int]:
    """The axes of a mesh, from ``"dp=2,tp=4"``."""
    try:
        return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form dp=2,tp=4") from None


def options(about: str | None) -> argparse.ArgumentParser:
    """The options that all training examples have; `about` is the docstring of the example."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", type=axes_of, help="axes over torchrun's processes: dp=2,tp=1")
    where.add_argument("--virtual", type=axes_of, help="axes over ranks inside this process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="windows in a step")
    parser.add_argument("--lr", type=float, default=4e-3, help="the peak learning rate")
    parser.add_argument("--decay", type=float, default=1e-2, help="AdamW's weight decay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", type=int, default=4096, help="windows of held-out text")
    parser.add_argument("--sample", type=int, default=240, help="bytes to generate")
    parser.add_argument("--backend", default="eager", help="jit's backend; inductor compiles first")
    # More threads than free cores slow everything down: torch's threads spin while they wait.
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in each process")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for a rank")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints to DIR/step-…")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="start from DIR's last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of pictures")
    _fail.options(parser)
    return parser


def run(
    name: str, options: argparse.Namespace, model: Model, recipe: Recipe, axes: tuple[str, ...]
) -> None:
    """Run an example: the job, the mesh, the sharded run, the report.

    `axes` are the axes that the recipe names; those that the user did not give have size one.
    """
    torch.set_num_threads(options.threads)
    with _job.job(name, options.timeout) as here:
        shape = dict.fromkeys(axes, 1) | (options.virtual or options.mesh)
        mesh = Mesh(shape, virtual=bool(options.virtual), timeout=options.timeout)
        if options.fail == "replan" and here.rank == options.fail_rank:
            options.decay *= 2
        task = Task.of(options, model)
        params, curve, held_out = sharded(task, recipe, mesh, here)
        if here.leads:
            here.awaited = "nobody"
            report(task, params, curve, held_out, here, mesh)
