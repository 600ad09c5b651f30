"""The tests on other versions of torch: the oldest, the pinned and the newest of the supported range.

``make matrix`` makes an environment for each under ``build/matrix`` (a CUDA build of torch is
gigabytes), runs the tests there, and writes the table ``tests/results/torch-versions.md``, each row as
soon as it is known. ``make matrix ARGS="--only oldest"`` runs one of them and writes its row alone.
``make newest`` runs a fixed part on the newest alone and writes nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

BUILD = ROOT / "build" / "matrix"
TABLE = ROOT / "tests" / "results" / "torch-versions.md"
UNAVAILABLE = 75  # as sysexits.h has it: try again later

# What the newest version must pass on every change: one file of each part of the library.
PART = [
    *("torch_versions", "trace", "program", "autodiff", "closures", "writes", "module", "nn", "optim"),
    *("random", "jit", "checkpoint", "residuals", "shard", "shard_map", "dropout", "strides", "fuse"),
    *("torch_privates", "fuse_stacks", "storage", "transformer", "hard_cases", "torch_checkpoint"),
]


class Unavailable(RuntimeError):
    """The registry does not serve what an environment needs."""


@dataclass(frozen=True)
class Verdict:
    """What one run of pytest came to."""

    torch: str
    python: str
    tests: int
    failures: tuple[str, ...]
    skipped: int
    seconds: float
    absent: str
    commit: str

    @property
    def passed(self) -> int:
        return self.tests - len(self.failures) - self.skipped


# -- versions ---------------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` as numbers that compare."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))


def supported() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The range of ``pyproject.toml``: the first version in it, the first beyond."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [d for d in project["dependencies"] if d.startswith("torch>=")]
    low, high = re.findall(r"[\d.]+", requirement)
    return numbers(low), numbers(high)


def served() -> list[str]:
    """The releases of torch that pip's registry has for this Python, newest first."""
    ask = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    answer = subprocess.run(ask, capture_output=True, text=True, timeout=600)
    listed = re.search(r"Available versions: (.*)", answer.stdout)
    if listed is None:
        raise Unavailable(f"pip lists no versions of torch:\n{answer.stderr[-2000:]}")
    releases = {version.split("+")[0] for version in listed[1].split(", ")}
    return sorted(releases, key=numbers, reverse=True)


def pinned() -> str:
    """The version of the test environment."""
    found = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, "constraints.txt pins no torch"
    return found[1]


def chosen(only: str | None) -> list[str]:
    """The versions to test: the oldest, the pinned and the newest, or one of them, or any other."""
    low, high = supported()
    if only is not None and re.match(r"\d", only):
        return [only]
    releases = [v for v in served() if low <= numbers(v) < high]
    named = {"oldest": releases[-1], "pinned": pinned(), "newest": releases[0]}
    return [named[only]] if only else list(dict.fromkeys(named.values()))


# -- environments -----------------------------------------------------------------------------------


def environment(version: str) -> Path:
    """The interpreter of an environment with this torch and all that the tests need."""
    place = BUILD / version
    python, ready = place / "bin" / "python", place / "ready"
    if ready.exists():
        return python
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    constraints = place / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    # Triton's version is torch's own affair there.
    others = [line for line in lines if not re.match(r"(torch|triton)==", line)]
    constraints.write_text("\n".join([*others, f"torch=={version}", ""]))
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*install, "-c", constraints, "-e", f"{ROOT}[test,examples]"])
    if done.returncode:
        raise Unavailable(f"pip could not install torch {version} with what the tests need")
    ready.touch()
    return python


# -- tests ------------------------------------------------------------------------------------------


def tested(version: str, python: Path, arguments: list[str]) -> Verdict:
    """Run pytest in an environment."""
    report = BUILD / f"{version}.xml"
    started = time.monotonic()
    subprocess.run(
        [python, "-m", "pytest", "-q", f"--junit-xml={report}", *arguments], cwd=ROOT, check=False
    )
    suite = ElementTree.parse(report).getroot()[0]
    failures = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    )
    return Verdict(
        torch=_asked(python, "import torch; print(torch.__version__)"),
        python=_asked(python, "import platform; print(platform.python_version())"),
        tests=int(suite.get("tests", 0)),
        failures=failures,
        skipped=int(suite.get("skipped", 0)),
        seconds=time.monotonic() - started,
        absent=_asked(
            python,
            "import torchard; from torchard.functional.torch_internals import operators; "
            "print(', '.join(operators.missing()))",
        ),
        commit=commit(),
    )


def commit() -> str:
    """The commit that is tested, ``+`` behind it if files have been changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _asked(python: Path, code: str) -> str:
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


HEAD = """# Tests on other versions of torch

Rows as `make matrix` wrote them, each with the commit that it ran.

| torch | Python | commit | passed | failed | skipped | minutes | operators it lacks |
|---|---|---|---:|---:|---:|---:|---|
"""


def row(verdict: Verdict) -> str:
    """A version's line of the table; what failed stands below it."""
    v = verdict
    counts = f"{v.passed:,} | {len(v.failures)} | {v.skipped} | {v.seconds / 60:.0f}"
    line = f"| {v.torch} | {v.python} | {v.commit} | {counts} | {v.absent or 'none'} |"
    return "\n".join([line, *(f"| | | | | `{failure}` | | | |" for failure in v.failures)])


def with_row(text: str, verdict: Verdict) -> str:
    """The table with this row in its place, or in the place of the last one of that version."""
    rows: dict[tuple[int, ...], list[str]] = {}
    for line in text.splitlines()[len(HEAD.splitlines()) :]:
        version = line.split("|")[1].strip()
        if version:
            rows[numbers(version)] = []
        rows[list(rows)[-1]].append(line)
    rows[numbers(verdict.torch)] = [row(verdict)]
    return HEAD + "".join(f"{line}\n" for key in sorted(rows) for line in rows[key])


def files_of_part() -> list[str]:
    """The files of PART."""
    found = {path.name: str(path) for path in (ROOT / "tests").rglob("test_*.py")}
    return [found[f"test_{name}.py"] for name in PART]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="oldest, pinned, newest, or a version")
    parser.add_argument("--part", action="store_true", help="a fixed part of the tests; no table")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    files = files_of_part() if options.part else []
    failed = False
    try:
        for version in chosen(options.only):
            verdict = tested(version, environment(version), [*files, *options.pytest])
            failed |= bool(verdict.failures or not verdict.tests)
            print(row(verdict), flush=True)
            if not options.part:
                TABLE.write_text(with_row(TABLE.read_text() if TABLE.exists() else HEAD, verdict))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
