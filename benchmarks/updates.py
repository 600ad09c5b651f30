"""Times of optimizers' updates, beside torch's fused and foreach ones: alone, and in a training step.

A GPT of four layers (69 parameters), on one process:

    python benchmarks/updates.py [--widths 64,256] [--rounds 20] [--inductor]

Everything of one width is timed in turn, A-B-B-A, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from gpt import GPT, batch

from torchard import functionalize, jit, optim

RATE, DECAY = 1e-3, 0.01


def torchs(width: int, update_only: bool, **how: bool) -> Callable[[], object]:
    """A step of torch's, or its update alone."""
    torch.manual_seed(0)
    model, (x, y) = GPT(width), batch()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, **how)
    model(x, y).backward()

    def step() -> object:
        if update_only:
            return optimizer.step()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if not update_only:
        optimizer.zero_grad()
    return step


def ours(width: int, update_only: bool, donates: bool, **how: str) -> Callable[[], object]:
    """A step of torchard's, or its update alone."""
    torch.manual_seed(0)
    fn, params = functionalize(GPT(width))
    params = {k: p.detach().clone() for k, p in params.items()}
    optimizer = optim.adamw(RATE, weight_decay=DECAY)
    state, (x, y) = optimizer.init(params), batch()
    grads = {k: p.clone() for k, p in params.items()}

    def train(params, state, x, y):
        grads, loss = torch.func.grad_and_value(fn)(params, x, y)
        return (*optimizer.update(grads, state, params), loss)

    def update(params, state, grads):
        return optimizer.update(grads, state, params)

    donated = (0, 1) if donates else ()
    how = {"backend": "eager", **how}
    run = jit(update if update_only else train, donate_argnums=donated, **how)
    args = (grads,) if update_only else (x, y)
    held = [params, state]
    del params, state

    def step() -> object:
        params, state = held
        held.clear()
        new, later, *loss = run(params, state, *args)
        held.extend((new, later))
        return loss[0].item() if loss else None

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="64,256")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inductor", action="store_true", help="also what Inductor compiles")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for width in map(int, given.widths.split(",")):
        for update_only in (True, False):
            steps = {
                "torch fused": torchs(width, update_only, fused=True),
                "torch foreach": torchs(width, update_only, foreach=True),
                "torchard": ours(width, update_only, donates=False),
                "torchard, donated": ours(width, update_only, donates=True),
                "torchard, donated, planned": ours(width, update_only, True, memory="planned"),
            }
            if given.inductor:
                compiled = ours(width, update_only, True, backend="inductor")
                steps["torchard, donated, compiled"] = compiled
            report(width, "update" if update_only else "step", steps, given.rounds)


def report(width: int, what: str, steps: dict[str, Callable[[], object]], rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(), step()
    for _ in range(rounds):
        for name in (*steps, *reversed(steps)):
            begin = time.perf_counter()
            steps[name]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    for name, each in times.items():
        low, median, high = statistics.quantiles(each, n=4)
        print(f"{what:8s} width {width:4d}  {name:28s} {median:8.2f} ms  [{low:.2f}-{high:.2f}]")


if __name__ == "__main__":
    main()
