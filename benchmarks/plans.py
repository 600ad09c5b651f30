"""Plans of a GPT's training step with AdamW, in sizes of which each is bound by something else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpt import GPT, batch

from torchard import (
    Colwise,
    Machine,
    Mesh,
    P,
    Rowwise,
    functionalize,
    jit,
    optim,
    parallelize,
    pipeline,
    place,
    shard,
    stage_specs,
)

__all__ = [
    *("BATCHES", "DECAY", "MICROBATCHES", "RATE", "SIZES", "SPLIT"),
    *("Plan", "PlannedStep", "Size", "plans"),
]

MICROBATCHES, BATCHES = 4, 8
RATE, DECAY = 1e-3, 0.01
# The dim of features along which tensor parallelism splits each projection's weight.
SPLIT = {"q": "out", "k": "out", "v": "out", "up": "out", "out": "in", "down": "in"}


class Size(NamedTuple):
    """The size of a model's step: the width, sequences, and tokens of each."""

    width: int
    batch: int
    length: int


# What steps of these sizes mostly do: multiply, call small operations and collectives, send gradients.
SIZES = {"multiplies": Size(192, 8, 64), "calls": Size(32, 8, 8), "sends": Size(320, 8, 8)}


class Plan(NamedTuple):
    """How a step runs: its size, the sizes of axes, and a pipeline's schedule.

    An axis is dp, fsdp (of which the batch is split as well), tp or pp.
    """

    size: Size
    axes: tuple[tuple[str, int], ...]
    schedule: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def __str__(self) -> str:
        return f"{' '.join(f'{a}={n}' for a, n in self.axes)} {self.schedule}".strip()


def plans(ranks: int) -> list[Plan]:
    """All plans in the first two sizes; in the last those that send parameters or gradients."""
    split = [((axis, ranks),) for axis in ("dp", "fsdp", "tp")]
    staged = [((("pp", ranks),), schedule) for schedule in ("1f1b", "gpipe")]
    if ranks == 4:
        split += [((axis, 2), ("tp", 2)) for axis in ("dp", "fsdp")]
        staged += [((("pp", 2), (axis, 2)), "1f1b") for axis in ("dp", "tp")]
    ways = [*((axes, "") for axes in split), *staged]
    return [
        Plan(size, *way)
        for name, size in SIZES.items()
        for way in ways
        if name != "sends" or {axis for axis, _ in way[0]} & {"dp", "fsdp"}
    ]


class PlannedStep:
    """A training step by a plan; it keeps the parameters and the optimizer's state."""

    def __init__(
        self,
        plan: Plan,
        *,
        virtual: bool = False,
        jitted: bool = False,
        machine: Machine | None = None,
    ) -> None:
        width, *size = plan.size
        torch.manual_seed(0)
        fn, params = functionalize(GPT(width, plan.size.length))
        params = {name: p.detach().clone() for name, p in params.items()}
        optimizer = optim.adamw(RATE, weight_decay=DECAY)

        def train(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            grads, loss = torch.func.grad_and_value(fn)(params, x, y)
            return (*optimizer.update(grads, state, params), loss)

        axes = dict(plan.axes)
        mesh = Mesh(axes, virtual=virtual)
        rows = next((a for a in ("dp", "fsdp") if a in axes), None)
        self.batches = [
            place(batch(n, *size), mesh, P(rows) if rows else P()) for n in range(BATCHES)
        ]
        specs: Any = {name: P() for name in params}
        if "tp" in axes or "fsdp" in axes:
            kinds = {"out": Colwise, "in": Rowwise}
            split = {f"blocks.*.{name}": kinds[dim]() for name, dim in SPLIT.items()}
            whole = "fsdp" if "fsdp" in axes else None
            specs, _ = parallelize(
                fn, mesh, split if "tp" in axes else {}, batch=rows, fsdp=whole
            )
        state = optim.AdamState(P(), specs, specs)
        if plan.schedule:
            where = {"stages": "blocks.*", "microbatches": MICROBATCHES, "batch": (None, None, 0, 0)}
            run = pipeline(train, mesh, "pp", schedule=plan.schedule, **where)
            if "tp" not in axes:
                specs = stage_specs(run, params, optimizer.init(params), *batch(0, *size))
        else:
            run = shard(train, mesh, out_specs=(specs, state, P()), machine=machine)
        self.params = place(params, mesh, specs)
        self.state = optimizer.init(self.params)
        self.run = jit(run, backend="eager", donate_argnums=(0, 1)) if jitted else run

    def __call__(self, number: int) -> float:
        """The loss on the batch of a number."""
        data = self.batches[number % BATCHES]
        self.params, self.state, loss = self.run(self.params, self.state, *data)
        return float(loss)

    def lowered(self) -> Any:
        return self.run.lower(self.params, self.state, *self.batches[0])

    def planned_bytes(self) -> int:
        """The bytes that a rank sends in a step, by its plan."""
        return sum(c.bytes * c.times for c in self.lowered().collectives)
