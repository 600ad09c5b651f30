"""Inductor against eager: programs that are hard for a compiler, random ones, and torch's own samples.

``make inductor`` runs all of them under `jit` with its default backend, with gradients where there are
any, in several dtypes, and writes ``tests/results/inductor.md``: a row for each kind of program, as soon
as it is known. ``ARGS="--only op_db"`` runs some kinds, and writes their rows alone.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import effect_programs
import op_db
import torch
from compiler_faults import FAULTS, unrepaired
from compiler_programs import Trial, compared, comparisons, differs, expanded_writes
from matrix import commit
from paths import RESULTS
from refusals import refuses
from sums_of_terms import sums_of_terms

from torchard.functional import jit
from torchard.functional.core import tree
from torchard.testing.strategies import random_program

BATCH = 60
SEEN = "compared"
# What `compared` says of an error, in place of values.
RAISED = re.compile(r"\w+: ")
COMPARED = (torch.float32, torch.bfloat16, torch.float64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)

# Where torch's own results are not determined, or its gradients are not those of the forward.
UNDETERMINED = op_db.UNDETERMINED | {"svd_lowrank", "pca_lowrank", "nn.functional.multi_head_attention"}


def sources(count: int, seed: int) -> dict[str, Callable[[], Iterable[Trial]]]:
    """All trials by kind, some of each."""
    every, some = max(1, 400 // count), range(seed, seed + max(4, count // 4))
    kinds: dict[str, Callable[[], Iterable[Trial]]] = {
        "writes into overlapping values": expanded_writes,
        **{f"exact comparisons, {d}": partial(comparisons, d, seed, every) for d in COMPARED},
        **{f"sums of terms, {d}": partial(sums_of_terms, d, some) for d in (*COMPARED, torch.float16)},
        "random programs": lambda: random_programs(range(seed, seed + count)),
        "programs with effects": lambda: programs_with_effects(range(seed, seed + count)),
    }
    for dtype in DTYPES:
        kinds[f"op_db, {dtype}"] = partial(samples, dtype, max(1, count // 100), seed)
    return kinds


def random_programs(seeds: Iterable[int]) -> Iterator[Trial]:
    """Programs of torchard.testing, in float32."""
    for number in seeds:
        program = random_program(number, steps=5)
        tensors = [_single(x) for x in program.inputs]
        yield Trial(f"random_program({number}, steps=5)", _all_of(program), tensors)


def programs_with_effects(seeds: Iterable[int]) -> Iterator[Trial]:
    """Programs that write in place and through views, in float32."""
    for number in seeds:
        program, x = effect_programs.program(number)
        yield Trial(f"effect_programs.program({number})", _loss_and_gradient(program), [_single(x)])


def samples(dtype: torch.dtype, limit: int, seed: int) -> Iterator[Trial]:
    """Sample calls of torch's operators, some of each entry, with gradients."""
    for entry in op_db.entries():
        if dtype not in entry.supported_dtypes("cpu") or entry.name in UNDETERMINED:
            continue
        try:
            found = list(islice(op_db.cases(entry, dtype), 60))
        except Exception:  # e.g. samples for another device
            continue
        for case in Random(seed).sample(found, min(limit, len(found))):
            yield Trial(f"{case} {dtype}", _sampled(case), case.tensors)


def _single(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _all_of(fn: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """A program's results and, of its floating inputs, gradients."""

    def results(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [x for x in tree.leaves(fn(*inputs)) if isinstance(x, torch.Tensor)]

    return _differentiated(results, lambda x: x.is_floating_point())


def _sampled(case: op_db.Case) -> Callable[..., list[torch.Tensor]]:
    wanted = iter(case.wanted)
    follow = {id(x) for x in case.tensors if next(wanted)}
    return _differentiated(case, lambda x: id(x) in follow) if case.differentiable else case


def _differentiated(
    fn: Callable[..., list[torch.Tensor]], follows: Callable[[torch.Tensor], bool]
) -> Callable[..., list[torch.Tensor]]:
    which: list[int] = []

    def both(*inputs: torch.Tensor) -> list[torch.Tensor]:
        at = which or [i for i, x in enumerate(inputs) if follows(x)]
        which[:] = at

        def floating(*followed: torch.Tensor) -> Any:
            given = list(inputs)
            for i, x in zip(at, followed, strict=True):
                given[i] = x
            out = fn(*given)
            real = [x for x in out if x.is_floating_point() or x.is_complex()]
            return real, [x for x in out if not (x.is_floating_point() or x.is_complex())]

        if not at:
            return fn(*inputs)
        real, pull, rest = torch.func.vjp(floating, *(inputs[i] for i in at), has_aux=True)
        return [*real, *rest, *pull([torch.ones_like(x) for x in real])]

    return both


def _loss_and_gradient(program: effect_programs.Program) -> Callable[..., list[torch.Tensor]]:
    def both(x: torch.Tensor) -> list[torch.Tensor]:
        return [program(x), torch.func.grad(program)(x)]

    return both


# -- the sweep ----------------------------------------------------------------------------------------


def runs(trial: Trial) -> str:
    """Whether torch runs it, twice alike, and torchard traces it: if not, why."""
    try:
        if differs(trial, trial(), trial()):
            return "eager's results are not determined"
    except Exception:
        return "eager does not run it"
    try:
        have = jit(trial.fn, backend="eager")(*trial.tensors)
        return "wrong without a compiler: " + trial.name if differs(trial, have, trial()) else ""
    except Exception as error:
        kind = "refused" if refuses(error) else "an error without a compiler: " + trial.name
        return f"{kind}, {type(error).__name__}" if kind == "refused" else kind


def sweep(trials: Iterable[Trial], counts: Counter[str]) -> Iterator[tuple[Trial, str]]:
    """Trials that Inductor gets wrong, in batches that are compiled together."""
    batch: list[Trial] = []
    for trial in trials:
        problem = runs(trial)
        if problem:
            counts[problem] += 1
            continue
        batch.append(trial)
        if len(batch) == BATCH:
            yield from _shown(batch, counts)
            batch = []
    yield from _shown(batch, counts)


def _shown(batch: list[Trial], counts: Counter[str]) -> Iterator[tuple[Trial, str]]:
    """What is wrong in a batch, printed as it is found, and counted."""
    for trial, problem in compared(batch, jit):
        print(f"WRONG {trial.name}\n    {problem}", flush=True)
        yield trial, problem
    counts[SEEN] += len(batch)
    print(f"  {counts[SEEN]} compared", flush=True)


# -- the table ----------------------------------------------------------------------------------------

TABLE = RESULTS / "inductor.md"
HEAD = """# Inductor beside eager

`make inductor`: values and gradients under `jit` with its default backend beside plain torch's. A result
may differ by what roundings of its operations explain (torchard.testing). Each row was written by one
run, at the commit it names. "Not comparable": plain torch does not run the sample, or not twice alike.

| programs | torch | date | commit | compared | wrong | raised | refused | not comparable | minutes |
|---|---|---|---|---:|---:|---:|---:|---:|---:|
"""
FOUND = """
## Faults of the compiler

Each is there without what torchard does about it, where the last column says so (torch {version}).

| fault | what is done | without it |
|---|---|---|
"""


def row(kind: str, counts: Counter[str], found: list[tuple[Trial, str]], minutes: float) -> str:
    """The row of one kind of programs."""
    raised = sum(RAISED.match(problem) is not None for _, problem in found)
    refused = sum(n for why, n in counts.items() if why.startswith("refused"))
    others = counts.total() - counts[SEEN] - refused
    numbers = (counts[SEEN], len(found) - raised, raised, refused, others)
    version, today = torch.__version__, datetime.date.today()
    shown = " | ".join(f"{n:,}" for n in numbers)
    return f"| {kind} | {version} | {today} | {commit()} | {shown} | {minutes:.0f} |"


def with_row(text: str, new: str) -> str:
    """The table with this row in its place, or in the place of the last one of its kind."""
    rows = {name_of_row(line): line for line in text.removeprefix(HEAD).splitlines() if "|" in line}
    rows[name_of_row(new)] = new
    return HEAD + "".join(f"{line}\n" for line in rows.values())


def name_of_row(line: str) -> str:
    """The first cell of a row."""
    return line.split("|")[1].strip()


def faults() -> Iterator[str]:
    """A row for each fault: what is done, and whether torch has it still."""
    for fault in FAULTS:
        print(f"fault: {fault.what}", flush=True)
        assert not fault.wrong(), fault.what
        with unrepaired():
            without = fault.wrong()
        yield f"| {fault.what} | {fault.remedy} | {'wrong' if without else 'right'} |\n"


def write(kinds: dict[str, Callable[[], Iterable[Trial]]]) -> int:
    """Run these kinds, and write the row of each; how many programs are wrong."""
    wrong = 0
    for kind, trials in kinds.items():
        print(kind, flush=True)
        started, counts = time.time(), Counter[str]()
        found = list(sweep(trials(), counts))
        wrong += len(found)
        old, _, rest = TABLE.read_text().partition("\n## ") if TABLE.exists() else (HEAD, "", "")
        text = with_row(old, row(kind, counts, found, (time.time() - started) / 60))
        TABLE.write_text(text + (f"\n## {rest}" if rest else ""))
        for why, number in counts.most_common():
            print(f"    {number} {why}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds whose name has this")
    parser.add_argument("--count", type=int, default=400, help="random programs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds = sources(options.count, options.seed)
    wrong = write({kind: trials for kind, trials in kinds.items() if options.only in kind})
    if options.only in "faults":
        old = TABLE.read_text().partition("\n## ")[0]
        TABLE.write_text(old + FOUND.format(version=torch.__version__) + "".join(faults()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
