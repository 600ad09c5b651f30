"""What plans send, beside what an expert would, for programs as others write them.

    python benchmarks/experts.py                  the table, and a comparison of numbers in float64
    python benchmarks/experts.py --plan "GRU"     the plans of cases whose names contain a text
    python benchmarks/experts.py --no-check       the table alone

Nothing is timed. Bytes are those that a rank sends; seconds are predicted for a core of a host, with
gloo. A plan counts as an expert's if it sends at most 1.05 times the expert's bytes and splits the work
as well.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from expert_programs import CASES, Case, Program

from torchard import machines, shard, tree

__all__ = ["LIMIT", "Result", "deviation", "lowered", "measured"]

LIMIT, WORK_LIMIT = 1.05, 1.2
TOLERANCE = 1e-9  # relative to the largest element, in float64
SLACK = 64  # bytes: a few numbers more than an expert's are no other plan


def lowered(program: Program) -> Any:
    """The program for a rank."""
    run = shard(program.fn, program.mesh, in_specs=program.in_specs, out_specs=program.out_specs)
    return run.lower(*program.args)


@dataclass(frozen=True)
class Result:
    """What the plan of a case sends.

    Attributes:
        bytes: what a rank sends.
        collectives: its calls, in all iterations of loops, after merging.
        repeats: the busiest rank's FLOPs, divided by those of a rank if all were split.
        seconds: predicted for a core of a host.
    """

    case: Case
    bytes: int
    collectives: int
    repeats: float
    seconds: float

    @property
    def ratio(self) -> float:
        if self.bytes == self.case.bytes:
            return 1.0
        return self.bytes / self.case.bytes if self.case.bytes else float("inf")

    @property
    def splits(self) -> bool:
        """Whether ranks repeat no more than an expert's."""
        return self.repeats <= WORK_LIMIT * self.case.repeats

    @property
    def good(self) -> bool:
        return self.bytes <= LIMIT * self.case.bytes + SLACK and self.splits

    def __str__(self) -> str:
        more = "" if self.splits else f"  computes {self.repeats:.1f} times a rank's share"
        return (
            f"{self.case.name:<52} {self.bytes:>9,} {self.collectives:>5} {self.case.bytes:>9,} "
            f"{self.case.collectives:>5} {self.ratio:>6.2f} {self.seconds * 1e3:>8.2f} ms"
            f"{'' if self.good else '  *'}{more}"
        )


def measured(case: Case) -> Result:
    program = case.program()
    plan = lowered(program)
    ranks = program.mesh.size
    collectives = list(plan.collectives)
    return Result(
        case,
        sum(c.bytes * c.times for c in collectives),
        sum(c.times for c in collectives),
        plan.work.rank_flops * ranks / max(plan.work.flops, 1),
        plan.time(machines.cpu()).seconds,
    )


def _full(value: Any) -> torch.Tensor:
    return value.full() if hasattr(value, "full") else value


def deviation(case: Case) -> float:
    """The largest difference from the function itself in float64, relative to the largest element."""
    program = case.program()
    args = tree.map(lambda t: t.double() if t.is_floating_point() else t, program.args)
    run = shard(program.fn, program.mesh, in_specs=program.in_specs, out_specs=program.out_specs)
    worst = 0.0
    got, want = tree.leaves(run(*args)), tree.leaves(program.fn(*args))
    for have, should in zip(map(_full, got), want, strict=True):
        assert have.shape == should.shape and have.dtype == should.dtype
        have, should = have.double(), should.double()
        error = (have - should).abs().max() / should.abs().max().clamp(min=1)
        worst = max(worst, error.nan_to_num(nan=float("inf")).item())
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", metavar="TEXT", help="print plans of cases with TEXT in their names")
    parser.add_argument("--no-check", action="store_true", help="do not compare numbers")
    options = parser.parse_args()
    if options.plan is not None:
        for case in CASES:
            if options.plan in case.name:
                print(f"{case.name}\n{lowered(case.program()).collectives}\n")
        return
    warnings.simplefilter("ignore")
    heads = ("case", "bytes", "calls", "expert's", "calls", "ratio", "predicted")
    print("{:<52} {:>9} {:>5} {:>9} {:>5} {:>6} {:>11}".format(*heads))
    good, wrong = 0, []
    for case in CASES:
        try:
            result = measured(case)
            good += result.good
            print(result, flush=True)
            if not options.no_check and not deviation(case) < TOLERANCE:
                wrong.append(case.name)
                print(f"    differs from one device by {deviation(case):.1e}")
        except Exception as error:  # told below, and by the exit status: the other cases still run
            wrong.append(case.name)
            print(f"{case.name:<52} {type(error).__name__}: {error}")
            traceback.print_exc(limit=-2)
    print(f"{good} of {len(CASES)} at most {LIMIT} x")
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
