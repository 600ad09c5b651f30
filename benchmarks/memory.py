"""What a checkpoint saves of memory and costs in time: torchard, torch's own, its compiler's budget.

    python benchmarks/memory.py            an MLP of 8 blocks, a GPT of 12 layers; results/ keeps it
    python benchmarks/memory.py --quick    smaller ones, less compiled, nothing kept

Peaks are bytes of all live storages, parameters, batch and gradients among them: of eager runs after each
operation (`LiveBytes`), of compiled ones by the profiler's memory events. Every gradient is compared with
plain autograd's before anything is measured.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from bench import RESULTS, aligned, machine
from blocks import Block, Loss, Model, gpt, mlp, train_gpt
from timing import Timing, in_turns
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from workload import Rival

from torchard import checkpoint, jit, policies
from torchard.functional import torch_internals as internals
from torchard.functional.programs.flops import DOTS, flops, op_name
from torchard.functional.programs.program import Program
from torchard.functional.torch_internals.operators import aten

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from _live import LiveBytes

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default, ATTENTION]
# Norm-wise, of every gradient, against plain autograd's: another order of sums, through 12 layers.
TOLERANCE = 1e-4
BUDGETS = [n / 10 for n in range(10, -1, -1)]


# -- ways to a gradient -----------------------------------------------------------------------------


def by_autograd(loss: Loss, model: Model) -> list[Tensor]:
    """The gradients of all parameters: forward, then backward."""
    leaves, structure = optree.tree_flatten(model.params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    value = loss(optree.tree_unflatten(structure, leaves), model.batch)
    return list(torch.autograd.grad(value, leaves))


def in_one(step: Callable[..., Any], model: Model) -> list[Tensor]:
    """The gradients from one function that makes them."""
    found: list[Tensor] = optree.tree_leaves(step(model.params, model.batch))
    return found


def per_block(block: Block, **options: Any) -> Block:
    return functools.partial(torch_checkpoint, block, use_reentrant=False, **options)


def policies_of(model: Model) -> list[policies.Policy]:
    return [
        policies.save_everything,
        policies.save_nothing,
        policies.save_dots,
        policies.save_names(model.label),
        policies.save_all_but_names(model.label),
        policies.offload_names(model.label),
    ]


@dataclass(frozen=True)
class Way:
    """A row: a way to the gradients, and torchard's program of it."""

    name: str
    run: Callable[[], list[Tensor]]
    program: Program | None = None


def ways_of(model: Model) -> list[Way]:
    """All rows of the first table."""
    saving = functools.partial(create_selective_checkpoint_contexts, MATMULS)
    rivals = {
        "autograd": model.loss,
        "torch checkpoint, per block": model.make(per_block),
        "torch checkpoint, matmuls saved": model.make(
            functools.partial(per_block, context_fn=saving)
        ),
    }
    ways = [Way(name, functools.partial(by_autograd, f, model)) for name, f in rivals.items()]
    for policy in policies_of(model):
        run = checkpoint(model.loss, where="block/*", policy=policy)
        joint = run.lower_joint(model.params, model.batch, argnums=0)
        ways.append(Way(f"{policy}, autograd", functools.partial(by_autograd, run, model), joint))
    for policy in policies_of(model):
        ways.append(step_of(f"{policy}, step", model, policy))
    return ways


def step_of(
    name: str, model: Model, policy: Any, where: str | None = "block/*", backend: str = "eager"
) -> Way:
    """The gradient as one program."""
    loss = checkpoint(model.loss, where=where, policy=policy)
    step = jit(torch.func.grad(loss), backend=backend)
    return Way(name, functools.partial(in_one, step, model), step.lower(model.params, model.batch))


def check(ways: list[Way], expected: list[Tensor]) -> None:
    """That all make the same gradients."""
    for way in ways:
        for value, right in zip(way.run(), expected, strict=True):
            error = float((value - right).norm() / right.norm())
            if not error <= TOLERANCE:
                raise AssertionError(f"{way.name}: a gradient is off by {error:.1e}")


# -- what is measured -------------------------------------------------------------------------------


def live_peak(run: Callable[[], Any], model: Model) -> int:
    """The most bytes alive after any operation of a run, the arguments among them."""
    run()
    gc.collect()
    with LiveBytes(optree.tree_leaves((model.params, model.batch))) as count:
        run()
    return count.peak()


def profiled_peak(run: Callable[[], Any], arguments: int) -> int:
    """The most bytes allocated at once in a run, by the profiler's memory events, and the arguments."""
    result = run()
    del result
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event["name"] == "[memory]"]
    found.sort(key=lambda event: event["args"]["Ev Idx"])
    first = found[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    most = max(event["args"]["Total Allocated"] for event in found)
    return int(most - before + arguments)


def product_flops(run: Callable[[], Any]) -> int:
    """FLOPs of products, as torch counts them, with the attention that it has on a CPU."""
    known = {
        ATTENTION.overloadpacket: lambda q, k, v, *_, out_shape, **__: sdpa_flop(q, k, v),
        ATTENTION_BACKWARD.overloadpacket: (
            lambda grad, q, k, v, *_, out_shape, **__: sdpa_backward_flop(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        run()
    return counter.get_total_flops()


def recomputed(program: Program, among: Callable[[Any], bool] = lambda node: True) -> int:
    """FLOPs of what a program makes again."""
    again = (node for node in program.calls if "recompute" in node.meta and among(node))
    return sum(map(flops, again))


def timed(ways: list[Way], rounds: int) -> list[Timing]:
    return in_turns([Rival(way.name, way.run, lambda _: []) for way in ways], rounds)


# -- the tables -------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def kb(size: int) -> str:
    return f"{size / 1e3:,.1f}"


def mega(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def eager_table(model: Model, rounds: int) -> str:
    """Every way of one model."""
    note(f"{model.name}: every policy")
    ways = ways_of(model)
    check(ways, ways[0].run())
    times = timed(ways, rounds)
    base = product_flops(ways[0].run)
    rows = [
        [
            *(model.name, "peak, kB", "simulated", "residuals, kB"),
            *("recomputed, MFLOP", "of it products", "ms"),
        ]
    ]
    for way, took in zip(ways, times, strict=True):
        row = [way.name, kb(live_peak(way.run, model))]
        if way.program is None:
            row += ["", "", "", mega(product_flops(way.run) - base)]
        else:
            products = recomputed(way.program, lambda node: op_name(node) in DOTS)
            row += [kb(way.program.peak), kb(way.program.residuals.bytes)]
            row += [mega(recomputed(way.program)), mega(products)]
        rows.append([*row, f"{1e3 * took.median:.1f}"])
    return aligned(rows)


def compiled_table(model: Model) -> str:
    """By how much the peak falls, of the graph run as it is and through Inductor."""
    rows = [[f"{model.name}: compiled", "eager, kB", "falls by", "Inductor, kB", "falls by"]]
    chosen = (policies.save_everything, policies.save_nothing, policies.save_dots)
    steps = {
        str(policy): [
            step_of("", model, policy, backend=backend).run for backend in ("eager", "inductor")
        ]
        for policy in chosen
    }
    losses = {"torch.compile": model.loss, "torch.compile, torch checkpoint": model.make(per_block)}
    plain = {
        name: [functools.partial(by_autograd, f, model) for f in (loss, torch.compile(loss))]
        for name, loss in losses.items()
    }
    for ways in (steps, plain):
        most: list[int] = []
        for name, (eager, made) in ways.items():
            note(f"{model.name}: {name} through Inductor")
            peaks = [live_peak(eager, model), profiled_peak(made, model.arguments)]
            most = most or peaks
            cells = [(kb(a), f"{1 - a / b:.1%}") for a, b in zip(peaks, most, strict=True)]
            rows.append([name, *cells[0], *cells[1]])
    return aligned(rows)


def by_compiler(model: Model, budget: float) -> int:
    """The peak of torch.compile with `activation_memory_budget`."""
    torch.compiler.reset()
    with internals.activation_memory_budget(budget):
        run = functools.partial(by_autograd, torch.compile(model.loss), model)
        return profiled_peak(run, model.arguments)


def budget_table(model: Model, compiled: bool = True) -> str:
    """torchard's budget of peak memory beside the compiler's budget of activations."""
    rows = [[f"{model.name}: budget", "of peak, kB", "torchard, kB", "simulated"]]
    rows[0] += ["recomputed, MFLOP", "s, known envelope"]
    rows[0] += ["torch.compile, kB", "against 1.0"] if compiled else []
    began = time.perf_counter()
    least = step_of("", model, policies.budget(fraction=0.0), None).program
    first = time.perf_counter() - began
    whole = step_of("", model, policies.save_everything, None).program
    assert least is not None and whole is not None
    theirs: list[int] = []
    for fraction in BUDGETS:
        note(f"{model.name}: a budget of {fraction}")
        began = time.perf_counter()
        way = step_of("", model, policies.budget(fraction=fraction), None)
        took = time.perf_counter() - began
        assert way.program is not None
        allowed = least.peak + int(fraction * (whole.peak - least.peak))
        row = [f"{fraction:.1f}", kb(allowed), kb(live_peak(way.run, model))]
        row += [kb(way.program.peak), mega(recomputed(way.program)), f"{took:.1f}"]
        if compiled:
            theirs.append(by_compiler(model, fraction))
            row += [kb(theirs[-1]), f"{theirs[-1] / theirs[0] - 1:+.1%}"]
        rows.append(row)
    return f"{aligned(rows)}\nthe first budget took {first:.1f} s to trace and plan"


# -- the run ----------------------------------------------------------------------------------------


def models(quick: bool) -> list[Model]:
    if quick:
        size = train_gpt.Size(context=32, width=64, heads=4, layers=2)
        return [mlp(width=32, rows=256, layers=4), gpt(size, rows=4)]
    size = train_gpt.Size(context=64, width=128, heads=4, layers=12)
    return [mlp(width=128, rows=2048), gpt(size, rows=8)]


def report(quick: bool) -> str:
    found = models(quick)
    title = machine().partition(";")[0] + f"; one process, {torch.get_num_threads()} thread"
    parts = [title, *(eager_table(model, 3 if quick else 15) for model in found)]
    parts += [compiled_table(model) for model in (found[:1] if quick else found)]
    parts += [budget_table(model, not quick) for model in found]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, less compiled")
    options = parser.parse_args()
    torch.set_num_threads(1)
    internals.compile_in_this_process()
    # Importing the compiler warns about torch.jit.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    text = report(options.quick)
    print(text)
    if not options.quick:
        version = torch.__version__.split("+")[0]
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{datetime.date.today()}-memory-torch-{version}.txt"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
