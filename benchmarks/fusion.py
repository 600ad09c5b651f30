"""Chains of operations bound by memory traffic: eager torch, torch.compile and fuse, side by side.

    python benchmarks/fusion.py            16 M elements each; the table is saved in results/
    python benchmarks/fusion.py --quick    small ones, few rounds, nothing saved
    python benchmarks/fusion.py NAME ...   only these chains, nothing saved
    python benchmarks/fusion.py --huge-pages  all of torch's memory in huge pages

Each chain is timed forward, then forward and backward: the outputs, and the gradients of all floating
inputs for fixed cotangents. Each system differentiates in its usual way: torch.autograd around eager
torch and torch.compile, torch.func.vjp inside of fuse. Before anything is timed, all values are compared
with those of eager torch in float64.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench import RESULTS, aligned, machine
from chains import CHAINS, Chain
from memory import profiled_peak
from timing import Timing, in_turns
from torch import Tensor
from workload import Rival

from torchard import fuse, trace
from torchard.functional import torch_internals as internals
from torchard.functional.programs.program import Program
from torchard.kernels import release

# Of norm-wise relative errors against eager torch in float64.
TOLERANCE = 1e-5
# The environment variable that makes torch allocate huge pages.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
FORWARD, BOTH = "forward", "forward + backward"
# The summary counts rows in which fuse takes no longer than this times the faster of the others.
ALLOWED = 1 / 0.95

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A row: the call of each system, and the program before and after fuse."""

    name: str
    rivals: list[Rival]
    before: Program
    after: Program


# -- values and gradients ---------------------------------------------------------------------------


def flat(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def by_autograd(fn: Callable[..., Any], chain: Chain, cotangents: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of floating arguments by autograd."""
    args = [x.detach().requires_grad_(x.is_floating_point()) for x in chain.args]
    outputs = flat(fn(*args))
    floating = [x for x in args if x.requires_grad]
    grads = torch.autograd.grad(outputs, floating, cotangents)
    return [*(x.detach() for x in outputs), *grads]


def step_of(chain: Chain) -> Callable[..., Any]:
    """A function of arguments and cotangents that returns outputs and gradients, by torch.func."""

    def step(args: tuple[Tensor, ...], cotangents: list[Tensor]) -> Any:
        floating = [i for i, x in enumerate(args) if x.is_floating_point()]

        def of_floating(*values: Tensor) -> Any:
            by_position = dict(zip(floating, values, strict=True))
            return tuple(flat(chain.fn(*(by_position.get(i, x) for i, x in enumerate(args)))))

        outputs, pullback = torch.func.vjp(of_floating, *(args[i] for i in floating))
        return [*outputs, *pullback(tuple(cotangents))]

    return step


def cotangents_of(chain: Chain) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=draw) for x in flat(chain.fn(*chain.args))]


def cases_of(chain: Chain) -> list[Case]:
    """The two rows of a chain: forward, and forward with backward."""
    torch.compiler.reset()
    fused = fuse(chain.fn)
    compiled = torch.compile(chain.fn, dynamic=False)
    runs: dict[str, Run] = {
        "eager": functools.partial(chain.fn, *chain.args),
        "compile": functools.partial(compiled, *chain.args),
        "fuse": functools.partial(fused, *chain.args),
    }
    forward = Case(
        f"{chain.name}, {FORWARD}",
        rivals(runs),
        trace(chain.fn)(*chain.args),
        fused.lower(*chain.args),
    )
    cotangents = cotangents_of(chain)
    step = step_of(chain)
    fused_step = fuse(step)
    runs = {
        "eager": functools.partial(by_autograd, chain.fn, chain, cotangents),
        "compile": functools.partial(by_autograd, compiled, chain, cotangents),
        "fuse": functools.partial(fused_step, chain.args, cotangents),
    }
    both = Case(
        f"{chain.name}, {BOTH}",
        rivals(runs),
        trace(step)(chain.args, cotangents),
        fused_step.lower(chain.args, cotangents),
    )
    return [forward, both]


def rivals(runs: dict[str, Run]) -> list[Rival]:
    return [Rival(name, run, flat) for name, run in runs.items()]


def worst_error(chain: Chain, cases: Sequence[Case]) -> float:
    """The largest error of any value of any system, against eager torch in float64."""
    wide = Chain(
        chain.name, chain.fn, tuple(x.double() if x.is_floating_point() else x for x in chain.args)
    )
    cotangents = [c.double() for c in cotangents_of(chain)]
    expected = by_autograd(wide.fn, wide, cotangents)
    worst = 0.0
    for case in cases:
        for rival in case.rivals:
            values = flat(rival.run())
            for value, exact in zip(values, expected, strict=False):
                error = float((value - exact).norm() / exact.norm())
                if value.shape != exact.shape or not error <= TOLERANCE:
                    raise AssertionError(f"{case.name}, {rival.name}: off by {error:.1e}")
                worst = max(worst, error)
    return worst


# -- the tables -------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def implementations(program: Program) -> str:
    """The implementations of a program's kernels, which are chosen when they first run."""
    return "; ".join(dict.fromkeys(str(use.how) for use in program.kernels)) or "not fused"


def row_of(case: Case, times: Sequence[Timing]) -> list[str]:
    eager, compiled, fused = times
    best = min(eager, compiled, key=lambda t: t.median)
    low, high = (1e3 * q for q in fused.quartiles)
    cells = [case.name, *(f"{1e3 * t.median:.1f}" for t in times), f"{low:.1f}–{high:.1f}"]
    cells += [
        f"{fused.times(best):.2f}",
        f"{eager.times(fused):.2f}",
        f"{compiled.times(fused):.2f}",
    ]
    nodes = [len(program.calls) for program in (case.before, case.after)]
    kernels = str(len(case.after.kernels))
    return [*cells, kernels, f"{nodes[0]} → {nodes[1]}", implementations(case.after)]


HEAD = ["milliseconds", "eager", "compile", "fuse", "quartiles", "fuse / best"]
HEAD += ["eager / fuse", "compile / fuse", "kernels", "nodes", "by"]


def table(chains: Sequence[Chain], rounds: int) -> str:
    """Check and time every chain; the table and its summary."""
    rows, ratios, worst = [HEAD], [], 0.0
    for chain in chains:
        note(chain.name)
        cases = cases_of(chain)
        worst = max(worst, worst_error(chain, cases))
        for case in cases:
            times = in_turns(case.rivals, rounds, clock=clock())
            rows.append(row_of(case, times))
            ratios.append(float(rows[-1][5]))
            note("  ".join(rows[-1]))
        gc.collect()
    lines = [aligned(rows), "", f"all values agree with float64 to {worst:.1e}"]
    lines += [
        f"fuse / best is at most {ALLOWED:.3f} on {sum(r <= ALLOWED for r in ratios)} of {len(ratios)} "
        f"rows, below 1 on {sum(r < 1 for r in ratios)}"
    ]
    return "\n".join(lines)


def clock() -> Callable[[], float]:
    """With one thread, the processor time of the process, which other processes do not affect."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def peak(run: Run, arguments: Sequence[Tensor]) -> int:
    """The most bytes allocated at once, arguments included, with nothing left from earlier calls."""

    def fresh() -> Any:
        release()
        return run()

    return profiled_peak(fresh, sum(x.nbytes for x in arguments))


def memory_table(chain: Chain) -> str:
    """The peak memory of a chain, which shows whether all its logits are ever allocated at once."""
    cotangents = cotangents_of(chain)
    fused, step = fuse(chain.fn), fuse(step_of(chain))
    already = [*chain.args, *cotangents]
    logits = 4 * chain.args[0].shape[0] * chain.args[1].shape[1]
    runs: dict[str, tuple[Run, Run]] = {
        "eager": (
            functools.partial(chain.fn, *chain.args),
            functools.partial(by_autograd, chain.fn, chain, cotangents),
        ),
        "fuse": (
            functools.partial(fused, *chain.args),
            functools.partial(step, chain.args, cotangents),
        ),
    }
    rows = [[f"{chain.name}: peak, MB", "arguments", "logits", FORWARD, BOTH]]
    for name, pair in runs.items():
        sizes = [sum(x.nbytes for x in already), logits, *(peak(r, already) for r in pair)]
        rows.append([name, *(f"{size / 1e6:,.1f}" for size in sizes)])
    return aligned(rows)


# -- the run ----------------------------------------------------------------------------------------


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def _pages() -> str:
    if os.environ.get(HUGE_PAGES):
        return f"all of torch's memory in huge pages ({HUGE_PAGES}=1)"
    buffers = "kernels/execution/buffers.py"
    return f"torch's default allocator; fuse allocates its results itself ({buffers})"


def report(names: Sequence[str], quick: bool) -> str:
    elements = 1 << (12 if quick else 24)
    chains = [make(elements) for name, make in CHAINS.items() if not names or name in names]
    title = machine().partition(";")[0] + f"; one process, {_threads()}; {_pages()}"
    legend = (
        "milliseconds of processor time, medians; a / b: the median over rounds of the ratio in the "
        "same round\nbest: the faster of eager and compile"
    )
    parts = [f"{title}\n{legend}", table(chains, 3 if quick else 15)]
    parts += [memory_table(chain) for chain in chains if chain.name.startswith("linear + cross")]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these chains: " + ", ".join(CHAINS))
    parser.add_argument("--quick", action="store_true", help="small chains, few rounds")
    parser.add_argument("--huge-pages", action="store_true", help="for all of torch's memory")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CHAINS):
        parser.error(f"there is no chain {', '.join(sorted(unknown))}")
    if options.huge_pages and not os.environ.get(HUGE_PAGES):  # torch reads it once, at the start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, HUGE_PAGES: "1"})
    torch.set_num_threads(options.threads)
    internals.compile_in_this_process()
    # Importing the compiler warns about torch.jit.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    text = report(options.names, options.quick)
    print(text)
    if not (options.quick or options.names or options.threads > 1):
        version = torch.__version__.split("+")[0]
        RESULTS.mkdir(exist_ok=True)
        pages = "-huge-pages" if options.huge_pages else ""
        path = RESULTS / f"{datetime.date.today()}-fusion{pages}-torch-{version}.txt"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
