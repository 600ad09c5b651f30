"""Exposed communication by source line, of each plan of a GPT's training step on four H100s.

    python benchmarks/exposed.py                     all plans; the text is saved in results/
    python benchmarks/exposed.py --traces FOLDER     and traces, for chrome://tracing and Perfetto

Nothing is run: ranks are virtual, and seconds are those of `Program.time`. The outer one of two axes is
between hosts.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import torch
from bench import RESULTS
from plans import SIZES, Plan, PlannedStep, plans

from torchard import machines


def shown(name: str, plan: Plan, traces: Path | None) -> str:
    axes = [axis for axis, _ in plan.axes]
    time = PlannedStep(plan, virtual=True).lowered().time(machines.h100(between=axes[:-1]))
    if traces is not None:
        time.trace(traces / f"{name}-{str(plan).replace(' ', '-').replace('=', '')}.json")
    return f"{name}, {plan}: {time}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, help="a folder for traces")
    parser.add_argument("--size", choices=SIZES, default="sends", help="the steps' size (default: sends)")
    options = parser.parse_args()
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    texts = [shown(options.size, p, options.traces) for p in plans(4) if p.size == SIZES[options.size]]
    print(text := "\n".join(texts))
    name = f"{datetime.date.today()}-exposed-torch-{torch.__version__.split('+')[0]}.txt"
    (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
