"""Two jobs save to one path at the same moment, and some are killed: the checkpoint is whole, of one job.

``python racing_saves.py --rounds 1000 --out tests/results/saves.md`` writes what became of all rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from torchard import ShapeDtype, StorageError, load, save

LIKE = {f"w{i}": ShapeDtype((100, 100)) for i in range(8)}
JOBS = (1, 2)
# Seconds: from the first fork until a job may begin, between the two, and until one is killed.
AHEAD, APART, KILLED_WITHIN = 0.015, 0.004, 0.05
REPORT = """# Two jobs that save to one path at the same moment

`make races` forks two jobs {0:,} times. Both save to one path; in every second round one of them is
killed at a random moment. Each time all values of the checkpoint were of one job, and nothing else was
left: of a job that was killed, after the next save to the path.

| rounds | first job | second job | checkpoint |
|---|---|---|---|
{1}
"""


def tree(job: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(like.shape, float(job)) for name, like in LIKE.items()}


def saved(job: int, path: Path) -> str:
    try:
        save(path, tree(job))
    except StorageError as error:
        assert "exists already" in str(error), error
        return "refused"
    return "saved"


def found(path: Path) -> int | None:
    """The job whose values are all of a checkpoint; None if there is none."""
    if not path.exists():
        return None
    values = torch.stack(list(load(path, LIKE).values())).unique().tolist()
    assert len(values) == 1, f"a mixture of {values}"
    return int(values[0])


class Forked:
    """A job in a process of its own, which begins at a moment of the monotonic clock."""

    def __init__(self, run: Callable[[], str], begin: float) -> None:
        self._out, out = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            return
        try:
            time.sleep(max(begin - time.monotonic(), 0))
            os.write(out, run().encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def result(self) -> str:
        """What it did; nothing if it was killed before, or failed."""
        with os.fdopen(self._out) as out:
            text = out.read()
        _, status = os.waitpid(self.pid, 0)
        return text or ("killed" if os.WIFSIGNALED(status) else "failed")


def round_of(path: Path, drawn: random.Random, killed: int | None) -> str:
    """One round: what the jobs did, and whose the checkpoint is.

    Raises:
        AssertionError: it is of both, or of none, or not of the one that says so.
    """
    begin = time.monotonic() + AHEAD
    jobs = [
        Forked(functools.partial(saved, job, path), begin + drawn.uniform(0, APART)) for job in JOBS
    ]
    if killed is not None:
        time.sleep(max(begin + drawn.uniform(0, KILLED_WITHIN) - time.monotonic(), 0))
        os.kill(jobs[killed].pid, signal.SIGKILL)
    results = [job.result() for job in jobs]
    owner = found(path)
    for job, result in zip(JOBS, results, strict=True):
        assert result in ("saved", "refused", "killed"), results
        assert result != "saved" or owner == job, f"{results}, and the checkpoint is of job {owner}"
    assert owner is not None and results[owner - 1] != "refused", f"{results}, and job {owner}"
    check_cleaned(path, "killed" in results)
    first, second = results
    return f"{first} | {second} | whole, of job {owner}"


def check_cleaned(path: Path, killed: bool) -> None:
    """Nothing else is left; or, of a job that was killed, nothing after the next save to this path."""
    if killed:
        shutil.rmtree(path)
        save(path, tree(3))
        assert found(path) == 3
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)


def rounds(count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """What became of rounds, of which every second one has a job killed, the first or the second."""
    drawn, known = random.Random(seed), Counter[str]()
    for number in range(count):
        path = folder / "saved"
        known[round_of(path, drawn, drawn.choice([0, 1]) if number % 2 else None)] += 1
        shutil.rmtree(path)
    return known


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        known = rounds(options.rounds, Path(folder))
    if options.out:
        options.out.write_text(REPORT.format(options.rounds, "\n".join(rows(known))))
    print(json.dumps(known))


def rows(known: Counter[str]) -> list[str]:
    return [f"| {count} | {what} |" for what, count in known.most_common()]


if __name__ == "__main__":
    main()
