"""Planted bugs: which law finds each, by how many examples, in what time; and what others find.

    make detection

A detector finds a bug by an example on which it raises an error for the wrong function, and none for the
right one on the same arguments.
"""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bugs_attention
import bugs_backward
import bugs_layers
import bugs_numeric
import torch
from detectors import LAWS, RIVALS, Detector, fresh, installed, symmetry
from draws import draw
from outcomes import Outcome, outcome
from planted import Planted

BUGS = [
    *bugs_layers.BUGS, *bugs_attention.BUGS, *bugs_backward.BUGS, *bugs_numeric.BUGS,
]  # fmt: skip
# Examples, by turns: values of about one, then those of all sizes, whole numbers and ties.
ORDINARY = ("ordinary",)


def example(bug: Planted, seed: int) -> tuple[Any, ...]:
    return draw(bug.spec, seed, **({"styles": ORDINARY} if seed % 2 == 0 else {}))


@dataclass
class Row:
    """What was found of one bug: the examples needed, or None, and seconds, by detector."""

    bug: Planted
    examples: dict[str, int | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)

    def found_by(self, names: Any) -> list[str]:
        return [name for name in names if self.examples.get(name)]


@functools.cache
def _control(right: Any, spec: str, name: str, seed: int) -> Outcome:
    """What a detector says of the right function."""
    bug = next(b for b in BUGS if b.right is right and b.spec == spec)
    args = example(bug, seed)
    return outcome(lambda: detectors_of(bug)[name](right, right, args))


@functools.cache
def _symmetry(action: Any) -> Detector:
    return symmetry(action)


def detectors_of(bug: Planted) -> dict[str, Detector]:
    own = {f"invariant ({name})": _symmetry(action) for name, action in bug.symmetries}
    return {**LAWS, **own, **RIVALS}


def search(bug: Planted, examples: int) -> Row:
    """Let each detector look for a bug, with one example after another."""
    row, wrong = Row(bug), bug.wrong()
    for name, detector in detectors_of(bug).items():
        row.examples[name], row.seconds[name] = None, 0.0
        for seed in range(examples):
            args = example(bug, seed)
            found = outcome(lambda a=args, d=detector: d(wrong, bug.right, fresh(a)))
            row.seconds[name] += found.seconds
            if found.word == "holds" or found.why.startswith("longer than"):
                continue
            control = _control(bug.right, bug.spec, name, seed)
            if control.word == "holds":
                row.examples[name] = seed + 1
                break
            if control.word == "refused":  # the detector cannot take this function
                continue
            row.alarms.append(f"{bug.function}, seed {seed}, {name}: {control.first_line[:200]}")
    return row


# -- the table ----------------------------------------------------------------------------------------


def table(rows: list[Row], examples: int, seconds: float) -> str:
    own = list(dict.fromkeys(n for r in rows for n in r.examples if n not in RIVALS))
    functions = len({(r.bug.module, r.bug.function) for r in rows})
    alone = [n for n in own if not n.startswith("equal")]
    heading = (
        f"{len(rows)} bugs planted in {functions} functions, as `make detection` looked for them with "
        f"{installed()}, by up to {examples} examples each, in {seconds:.0f} s. A detector finds a bug "
        "where it raises an error for the wrong function and none for the right one on the same "
        "arguments. The right function is known to `equal`, `assert_close` and pytest-torch; other laws "
        "and gradcheck (with gradgradcheck) see the wrong one alone. `assert_close` compares values in "
        "float32 at rtol = atol = 1e-5. pytest-torch is its inference contract, gradcheck and "
        "comparison. "
        "hypothesis-torch 2.0.7 draws arguments and checks nothing, and chex 0.1.92 is of JAX's arrays: "
        "neither was run."
    )
    parts = ["# Planted bugs", heading, _totals(rows, own, alone), _bugs(rows, own)]
    missed = [r.bug.name for r in rows if not r.found_by(own)]
    parts += ["## Found by no law", "\n".join(f"- {name}" for name in missed) or "None."]
    alarms = sorted({line for r in rows for line in r.alarms})
    parts += ["## Fault found with a right function", "\n".join(f"- {a}" for a in alarms) or "None."]
    return "\n\n".join(parts) + "\n"


def _totals(rows: list[Row], own: list[str], alone: list[str]) -> str:
    lines = ["| detector | bugs found | median s |", "|---|---:|---:|"]
    groups = {"all laws": own, "laws without the right function": alone}
    for name, members in {**groups, **{n: [n] for n in (*own, *RIVALS)}}.items():
        found = sum(bool(r.found_by(members)) for r in rows)
        times = sorted(sum(r.seconds.get(m, 0.0) for m in members) for r in rows)
        lines.append(f"| {name} | {found} | {times[len(times) // 2]:.2f} |")
    return "\n".join(lines)


def _bugs(rows: list[Row], own: list[str]) -> str:
    names = list(RIVALS)
    lines = [f"| bug | found by (examples) | s | {' | '.join(names)} |"]
    lines += [f"|---|---|---:|{'---|' * len(names)}"]
    for row in rows:
        found = ", ".join(f"{n} ({row.examples[n]})" for n in row.found_by(own)) or "–"
        first = min((row.seconds[n] for n in row.found_by(own)), default=0.0)
        others = " | ".join(str(row.examples[n] or "–") for n in names)
        lines.append(f"| {row.bug.name} | {found} | {first:.2f} | {others} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="bugs whose names contain this")
    parser.add_argument("--examples", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, rows = time.time(), []
    for bug in BUGS:
        if not given.only or given.only in bug.name:
            rows.append(search(bug, given.examples))
            found = {n: e for n, e in rows[-1].examples.items() if e}
            print(f"{bug.name}: {found or 'not found'}", flush=True)
    text = table(rows, given.examples, time.time() - began)
    if given.out:
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
