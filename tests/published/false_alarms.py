"""Correct functions on drawn arguments: a law that finds fault with one of them is wrong itself.

Or it finds a defect, which is then listed in tests/results/defects.md.

make alarms ARGS="--draws 10000"

Writes a table of alarms by law and dtype. Each alarm is printed with the line that repeats it.
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from correct import CORRECT, PUBLISHED, TORCH, Correct
from draws import draw
from outcomes import Outcome, outcome

from torchard.testing import check_batching, check_derivatives, check_dtypes, check_pure, equal

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)


def laws(entry: Correct, args: tuple[Any, ...]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The laws of a correct function: their names, dtypes and calls."""
    fn, orders = entry.function, ("value", "gradient", "jvp", "second")[: 2 + 2 * (entry.order > 1)]
    yield "check_derivatives", "float64", lambda: check_derivatives(fn, *args, order=entry.order)
    yield "check_pure", "float64", lambda: check_pure(fn, *args)
    for dtype in DTYPES:
        name, narrow = str(dtype).removeprefix("torch."), cast(args, dtype)
        yield "check_dtypes", name, lambda d=dtype: check_dtypes(fn, *args, dtypes=(d,))
        if dtype != torch.bfloat16:
            yield "check_batching", name, lambda a=narrow: check_batching(fn, *a, orders=orders[:2])
        if entry.other is not None:
            other = entry.other
            yield "equal", name, lambda a=narrow, other=other: equal(fn, other, *a, orders=orders)


def repeat(entry: Correct, seed: int, law: str, dtype: str) -> str:
    return (
        f"python tests/published/false_alarms.py --only {entry.name!r} --seed {seed} --draws 1 "
        f"--law {law} --dtype {dtype}"
    )


class Tally:
    """Outcomes by law and dtype, and the alarms."""

    def __init__(self) -> None:
        self.words: dict[tuple[str, str], collections.Counter[str]] = {}
        self.alarms: list[str] = []
        self.refused: dict[str, int] = {}
        self.draws = 0

    def add(self, entry: Correct, seed: int, law: str, dtype: str, found: Outcome) -> None:
        self.words.setdefault((law, dtype), collections.Counter())[found.word] += 1
        if found.word == "fails":
            self.alarms.append(f"{entry.name}, seed {seed}, {law}, {dtype}: {_worst(found.why)}")
            print(f"ALARM {entry.name}: {found.why}\n  {repeat(entry, seed, law, dtype)}", flush=True)
        elif found.word == "refused":
            line = f"{entry.name}, {law}, {dtype}: {found.first_line[:160]}"
            self.refused[line] = self.refused.get(line, 0) + 1

    def table(self, heading: str) -> str:
        rows = ["| law | dtype | holds | alarms | refused |", "|---|---|---:|---:|---:|"]
        for (law, dtype), count in sorted(self.words.items()):
            numbers = " | ".join(str(count[word]) for word in ("holds", "fails", "refused"))
            rows.append(f"| `{law}` | {dtype} | {numbers} |")
        parts = ["# False alarms", heading, "\n".join(rows)]
        parts += ["## Alarms", "\n".join(f"- {line}" for line in self.alarms) or "None."]
        refused = [f"- {line} ({count} times)" for line, count in self.refused.items()]
        parts += ["## Refused", "\n".join(refused) or "None."]
        return "\n\n".join(parts) + "\n"


def _worst(why: str) -> str:
    """The row of a report that is marked, or the first line."""
    lines = why.split("\n")
    return next((" ".join(line.split()) for line in lines if "<--" in line), lines[0])[:240]


def run(
    entries: list[Correct], draws: int, first: int = 0, law: str = "", dtype: str = ""
) -> Tally:
    """Draw arguments for one function after another."""
    tally = Tally()
    for number in range(draws):
        entry, seed = entries[number % len(entries)], first + number // len(entries)
        args = draw(entry.spec, seed, most=entry.most)
        tally.draws += 1
        for name, kind, call in laws(entry, args):
            if (not law or law == name) and (not dtype or dtype == kind):
                tally.add(entry, seed, name, kind, outcome(call))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw of each function")
    parser.add_argument("--only", help="functions whose names contain this")
    parser.add_argument("--law", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--torch", action="store_true", help="only torch's own functions")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    entries = TORCH if given.torch else CORRECT
    entries = [e for e in entries if not given.only or given.only in e.name]
    began = time.time()
    tally = run(entries, given.draws, given.seed, given.law, given.dtype)
    heading = (
        f"{tally.draws} draws of arguments for {len(entries)} correct functions, "
        f"{sum(e in PUBLISHED for e in entries)} of them of published packages, as `make alarms` ran "
        f"them with torch {torch.__version__}, in {time.time() - began:.0f} s. "
        "An alarm is false, but where defects.md lists the function."
    )
    if given.out:
        given.out.write_text(tally.table(heading))
    print(tally.table(heading))
    return bool(tally.alarms)


if __name__ == "__main__":
    raise SystemExit(main())
