"""The memory and time of checkpoints: torchard's, torch's, and the memory budget of torch.compile.

    python benchmarks/memory.py            an MLP of 8 blocks, a GPT of 12 layers; saved in results/
    python benchmarks/memory.py --quick    smaller models, less compiled, nothing saved

Peaks are bytes of all live storages, including parameters, batch and gradients: in eager runs after each
operation (`LiveBytes`), in compiled ones by the profiler's memory events. Before anything is measured,
every gradient is compared with plain autograd's.
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
from torchard.functional.costs.flops import DOTS, flops, op_name
from torchard.functional.programs.program import Program
from torchard.functional.torch_internals.operators import aten

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from _live import LiveBytes

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default, ATTENTION]
# Of the norm-wise error of gradients against plain autograd's: sums in another order, through 12 layers.
TOLERANCE = 1e-4
BUDGETS = [n / 10 for n in range(10, -1, -1)]


# -- methods ----------------------------------------------------------------------------------------


def by_autograd(loss: Loss, model: Model) -> list[Tensor]:
    """The gradients of all parameters by autograd."""
    leaves, structure = optree.tree_flatten(model.params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    value = loss(optree.tree_unflatten(structure, leaves), model.batch)
    return list(torch.autograd.grad(value, leaves))


def in_one(step: Callable[..., Any], model: Model) -> list[Tensor]:
    """The gradients of all parameters by a function that returns them."""
    gradients: list[Tensor] = optree.tree_leaves(step(model.params, model.batch))
    return gradients


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
class Method:
    """A row: a method to compute the gradients, and its program if it is torchard's."""

    name: str
    run: Callable[[], list[Tensor]]
    program: Program | None = None


def methods_of(model: Model) -> list[Method]:
    """All rows of the first table."""
    saving = functools.partial(create_selective_checkpoint_contexts, MATMULS)
    rivals = {
        "autograd": model.loss,
        "torch checkpoint, per block": model.make(per_block),
        "torch checkpoint, matmuls saved": model.make(
            functools.partial(per_block, context_fn=saving)
        ),
    }
    methods = [Method(name, functools.partial(by_autograd, f, model)) for name, f in rivals.items()]
    for policy in policies_of(model):
        loss = checkpoint(model.loss, where="block/*", policy=policy)
        joint = loss.lower_joint(model.params, model.batch, argnums=0)
        run = functools.partial(by_autograd, loss, model)
        methods.append(Method(f"{policy}, autograd", run, joint))
    for policy in policies_of(model):
        methods.append(step_of(f"{policy}, step", model, policy))
    return methods


def step_of(
    name: str, model: Model, policy: Any, where: str | None = "block/*", backend: str = "eager"
) -> Method:
    """The method that computes the gradient as one program."""
    loss = checkpoint(model.loss, where=where, policy=policy)
    step = jit(torch.func.grad(loss), backend=backend)
    run = functools.partial(in_one, step, model)
    return Method(name, run, step.lower(model.params, model.batch))


def check(methods: list[Method], expected: list[Tensor]) -> None:
    """Check that all methods compute the same gradients."""
    for method in methods:
        for value, exact in zip(method.run(), expected, strict=True):
            error = float((value - exact).norm() / exact.norm())
            if not error <= TOLERANCE:
                raise AssertionError(f"{method.name}: a gradient is off by {error:.1e}")


# -- measurements -----------------------------------------------------------------------------------


def live_peak(run: Callable[[], Any], model: Model) -> int:
    """The most bytes alive after any operation of a run, arguments included."""
    run()
    gc.collect()
    with LiveBytes(optree.tree_leaves((model.params, model.batch))) as live:
        run()
    return live.peak()


def profiled_peak(run: Callable[[], Any], arguments: int) -> int:
    """The most bytes allocated at once in a run, by the profiler's memory events, plus the arguments."""
    result = run()
    del result
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocations = [event for event in events if event["name"] == "[memory]"]
    allocations.sort(key=lambda event: event["args"]["Ev Idx"])
    first = allocations[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    most = max(event["args"]["Total Allocated"] for event in allocations)
    return int(most - before + arguments)


def product_flops(run: Callable[[], Any]) -> int:
    """The FLOPs of products as torch counts them, with torch's CPU kernel for attention added."""
    formulas = {
        ATTENTION.overloadpacket: lambda q, k, v, *_, out_shape, **__: sdpa_flop(q, k, v),
        ATTENTION_BACKWARD.overloadpacket: (
            lambda grad, q, k, v, *_, out_shape, **__: sdpa_backward_flop(grad, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return counter.get_total_flops()


def recomputed(program: Program, among: Callable[[Any], bool] = lambda node: True) -> int:
    """The FLOPs that a program recomputes, in nodes that a predicate selects."""
    nodes = (node for node in program.calls if "recompute" in node.meta and among(node))
    return sum(map(flops, nodes))


def timed(methods: list[Method], rounds: int) -> list[Timing]:
    rivals = [Rival(method.name, method.run, lambda _: []) for method in methods]
    return in_turns(rivals, rounds)


# -- the tables -------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def kb(size: int) -> str:
    return f"{size / 1e3:,.1f}"


def mega(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def eager_table(model: Model, rounds: int) -> str:
    """The table of all methods, for one model."""
    note(f"{model.name}: every policy")
    methods = methods_of(model)
    check(methods, methods[0].run())
    timings = timed(methods, rounds)
    base = product_flops(methods[0].run)
    rows = [
        [
            *(model.name, "peak, kB", "simulated", "residuals, kB"),
            *("recomputed, MFLOP", "in products", "ms"),
        ]
    ]
    for method, timing in zip(methods, timings, strict=True):
        row = [method.name, kb(live_peak(method.run, model))]
        if method.program is None:
            row += ["", "", "", mega(product_flops(method.run) - base)]
        else:
            products = recomputed(method.program, lambda node: op_name(node) in DOTS)
            row += [kb(method.program.peak), kb(method.program.residuals.bytes)]
            row += [mega(recomputed(method.program)), mega(products)]
        rows.append([*row, f"{1e3 * timing.median:.1f}"])
    return aligned(rows)


def compiled_table(model: Model) -> str:
    """How far checkpoints reduce the peak of the graph, run eagerly and through Inductor."""
    rows = [[f"{model.name}: compiled", "eager, kB", "less", "Inductor, kB", "less"]]
    compared = (policies.save_everything, policies.save_nothing, policies.save_dots)
    steps = {
        str(policy): [
            step_of("", model, policy, backend=backend).run for backend in ("eager", "inductor")
        ]
        for policy in compared
    }
    losses = {"torch.compile": model.loss, "torch.compile, torch checkpoint": model.make(per_block)}
    plain = {
        name: [functools.partial(by_autograd, f, model) for f in (loss, torch.compile(loss))]
        for name, loss in losses.items()
    }
    for runs in (steps, plain):
        base: list[int] = []  # the peaks of the first run, without a checkpoint
        for name, (eager, compiled) in runs.items():
            note(f"{model.name}: {name} through Inductor")
            peaks = [live_peak(eager, model), profiled_peak(compiled, model.arguments)]
            base = base or peaks
            cells = [(kb(a), f"{1 - a / b:.1%}") for a, b in zip(peaks, base, strict=True)]
            rows.append([name, *cells[0], *cells[1]])
    return aligned(rows)


def by_compiler(model: Model, budget: float) -> int:
    """The peak of torch.compile under an `activation_memory_budget`."""
    torch.compiler.reset()
    with internals.activation_memory_budget(budget):
        run = functools.partial(by_autograd, torch.compile(model.loss), model)
        return profiled_peak(run, model.arguments)


def budget_table(model: Model, compiled: bool = True) -> str:
    """The table of torchard's budgets of peak memory, beside torch.compile's budgets of activations."""
    rows = [[f"{model.name}: budget", "of peak, kB", "torchard, kB", "simulated"]]
    rows[0] += ["recomputed, MFLOP", "s, known envelope"]
    rows[0] += ["torch.compile, kB", "against 1.0"] if compiled else []
    began = time.perf_counter()
    least = step_of("", model, policies.budget(fraction=0.0), None).program
    first = time.perf_counter() - began
    unchecked = step_of("", model, policies.save_everything, None).program
    assert least is not None and unchecked is not None
    theirs: list[int] = []
    for fraction in BUDGETS:
        note(f"{model.name}: a budget of {fraction}")
        began = time.perf_counter()
        method = step_of("", model, policies.budget(fraction=fraction), None)
        seconds = time.perf_counter() - began
        assert method.program is not None
        allowed = least.peak + int(fraction * (unchecked.peak - least.peak))
        row = [f"{fraction:.1f}", kb(allowed), kb(live_peak(method.run, model))]
        row += [kb(method.program.peak), mega(recomputed(method.program)), f"{seconds:.1f}"]
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
    measured = models(quick)
    title = machine().partition(";")[0] + f"; one process, {torch.get_num_threads()} thread"
    parts = [title, *(eager_table(model, 3 if quick else 15) for model in measured)]
    parts += [compiled_table(model) for model in (measured[:1] if quick else measured)]
    parts += [budget_table(model, not quick) for model in measured]
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
