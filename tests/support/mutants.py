"""`make mutants`: the library broken on purpose, one mistake at a time, and which test notices.

The mutants are data: ``tests/mutants/*.toml``, a file for each room. A mutant replaces a text that occurs
once in its file. ``--systematic N`` adds N small changes drawn at random (`systematic_mutants.py`).

Each mutant is tested in a copy of the tracked files: by the tests named for it, by those of the folder
that mirrors its file's, and by tests of everything. A failure counts if the same test passes without the
mutant. Processes that exceed their time count as killed, and are listed as such.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from paths import RESULTS, ROOT, TESTS

DATA = TESTS / "mutants"
# Tests of everything at once, for mutants that the tests of their folder let live.
STRONG = (
    "tests/stacks/test_seeds.py",
    "tests/stacks/test_transformer.py",
    "tests/stacks/test_random_programs.py",
    "tests/stacks/test_composition.py",
    "tests/testing/test_library_laws.py",
)
# Seconds for the named tests, those of the folder, and the others.
LIMITS = {"named": 300, "folder": 900, "strong": 900, "full": 7200}


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old`, which occurs once in `file`, becomes `new`.

    Attributes:
        what: the mistake, in words.
        tests: arguments of pytest for the tests that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    tests: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the mistake in it."""
        assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} times in {self.file}"
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the test that failed, or "" if none did."""

    mutant: Mutant
    test: str
    stage: str
    seconds: float


def written_by_hand() -> list[Mutant]:
    """The mutants of ``tests/mutants/*.toml``."""
    files = sorted(DATA.glob("*.toml"))
    return [Mutant(**row) for file in files for row in tomllib.loads(file.read_text())["mutant"]]


def mirrored(file: str) -> list[str]:
    """The tests of the folder that mirrors a file's; of a room's root, those beside its folders."""
    folder = TESTS / Path(file).parent
    while not list(folder.glob("test_*.py")):
        folder = folder.parent
    return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("test_*.py"))]


class Copy:
    """A copy of the project's tracked files, in which one mutant at a time is tested."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        where = self._python(60, "-c", "import torchard; print(torchard.__file__)")[1]
        assert Path(where.strip()).is_relative_to(root), f"{where} is not the copy in {root}"

    def write(self, file: str, text: str) -> None:
        """Replace a file, and forget what Python compiled of it."""
        path = self.root / file
        path.write_text(text)
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()

    def pytest(self, seconds: float, *args: str) -> tuple[int | None, str]:
        """The exit status (None: too slow) and the first test that failed."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no")
        status, text = self._python(seconds, "-m", "pytest", *options, *args)
        failed = re.search(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
        if status in (4, 5):
            raise SystemExit(f"pytest {shlex.join(args)} ran no test:\n{text[-2000:]}")
        return status, failed[1] if failed else "" if status == 0 else f"exit status {status}"

    def _python(self, seconds: float, *args: str) -> tuple[int | None, str]:
        ours = {"PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1"}
        # pytest's summary has no messages behind the names of tests if there is no room for them.
        env = {k: v for k, v in os.environ.items() if k != "CI"} | ours | {"COLUMNS": "40"}
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                [sys.executable, *args],
                cwd=self.root,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            with contextlib.suppress(ProcessLookupError):  # also the processes that tests have started
                os.killpg(process.pid, signal.SIGKILL)
            slow = process.wait() == -signal.SIGKILL
            out.seek(0)
            return None if slow else process.returncode, out.read()


class Runner:
    """Tests mutants, one in each copy at a time."""

    def __init__(self, jobs: int, full: bool) -> None:
        self.full = full
        self._lock = threading.Lock()
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        for number in range(jobs):
            self._copies.put(Copy(Path(self._folder.name, str(number)).resolve()))

    def run(self, mutant: Mutant) -> Outcome:
        """Test a mutant, stage by stage, until a test fails."""
        copy = self._copies.get()
        begin, original = time.monotonic(), (copy.root / mutant.file).read_text()
        try:
            copy.write(mutant.file, mutant.applied(original))
            test, stage = self._killed(copy, mutant)
        finally:
            copy.write(mutant.file, original)
            self._copies.put(copy)
        outcome = Outcome(mutant, test, stage, time.monotonic() - begin)
        with self._lock:
            print(f"{mutant.name}: {test or 'SURVIVES'} ({stage}, {outcome.seconds:.0f} s)", flush=True)
        return outcome

    def _killed(self, copy: Copy, mutant: Mutant) -> tuple[str, str]:
        stages = {"named": shlex.split(mutant.tests), "folder": mirrored(mutant.file), "strong": STRONG}
        stages |= {"full": ("tests", "src")} if self.full else {}
        for stage, args in stages.items():
            status, test = copy.pytest(LIMITS[stage], *args) if args else (0, "")
            if status is None:
                return "too slow", stage
            if status:
                return test, stage
        return "", stage

    def confirmed(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes, without those whose test fails in an unchanged copy too."""
        tests = sorted({o.test for o in outcomes if "::" in o.test})
        copy, unsound = self._copies.get(), set[str]()
        while tests and copy.pytest(LIMITS["full"], *tests)[0]:
            unsound |= {test for test in tests if copy.pytest(LIMITS["named"], test)[0]}
            tests = [test for test in tests if test not in unsound]
        self._copies.put(copy)
        return [replace(o, test="", stage="fails anyway") if o.test in unsound else o for o in outcomes]


def report(title: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table of one kind of mutants, in Markdown."""
    killed = [o for o in outcomes if o.test]
    share = len(killed) / max(len(outcomes), 1)
    slow = sum(o.test == "too slow" for o in killed)
    yield f"## {title}: {len(killed)} of {len(outcomes)} killed ({share:.1%}), {slow} by time"
    yield ""
    yield "| mutant | file | mistake | killed by | stage | s |"
    yield "|---|---|---|---|---|---|"
    for o in outcomes:
        test = f"`{o.test.replace('|', '¦')}`" if o.test else "**survives**"
        what = o.mutant.what.replace("|", "¦")
        yield f"| {o.mutant.name} | {o.mutant.file} | {what} | {test} | {o.stage} | {o.seconds:.0f} |"
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="mutants whose name has this in it")
    parser.add_argument("--full", action="store_true", help="survivors go through the whole suite")
    parser.add_argument("--systematic", type=int, metavar="N", help="N mutants drawn at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}/")
    options = parser.parse_args()
    if options.systematic:
        from systematic_mutants import drawn

        title, file = f"Drawn with seed {options.seed}", "mutants-systematic.md"
        mutants = drawn(options.systematic, options.seed)
    else:
        title, file, mutants = "Written by hand", "mutants.md", written_by_hand()
    mutants = [m for m in mutants if options.only is None or options.only in m.name]
    runner = Runner(options.jobs, options.full)
    begin = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = runner.confirmed(list(pool.map(runner.run, mutants)))
    table = "\n".join(report(title, outcomes))
    print(f"\n{table}\n{time.monotonic() - begin:.0f} s")
    if options.write:
        (RESULTS / file).write_text(f"# Mutants\n\nWritten by `make mutants`.\n\n{table}\n")
    return int(sum(not o.test for o in outcomes) > len(outcomes) * 0.05)


if __name__ == "__main__":
    sys.exit(main())
