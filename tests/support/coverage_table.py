"""`make coverage`: lines and branches of each room and file, from the data of a run, as Markdown.

    python coverage_table.py [--note TEXT] > tests/results/coverage.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paths import ROOT

ROOMS = {"functional": "functional", "sharding": "sharding", "kernels": "kernels"} | {
    "src": "torchard.testing"
}
HEAD = ("statements", "missed", "lines", "branches", "missed", "branches covered")
# Why what pyproject.toml excludes cannot run, or need not.
EXCLUDED = (
    "bodies of Protocols, overloads and abstract methods, imports for type checkers, and functions under "
    "@triton.jit, which Triton compiles from their source"
)


def measured() -> dict[str, Any]:
    """The summary of each file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "coverage.json")
        command = [sys.executable, "-m", "coverage", "json", "-q", "-o", str(path)]
        subprocess.run(command, cwd=ROOT, check=True)
        return {name: file["summary"] for name, file in json.loads(path.read_text())["files"].items()}


def row(name: str, summaries: Iterable[dict[str, int]]) -> str:
    """One line of a table, of one or several files."""
    sums: dict[str, int] = defaultdict(int)
    for summary in summaries:
        for key, value in summary.items():
            sums[key] += value if isinstance(value, int) else 0
    counts = []
    for all_, missed in (("num_statements", "missing_lines"), ("num_branches", "missing_branches")):
        share = 1 - sums[missed] / sums[all_] if sums[all_] else 1.0
        counts += [f"{sums[all_]:,}", f"{sums[missed]:,}", f"{share:.1%}"]
    return f"| {' | '.join([name, *counts])} |"


def table(note: str, files: dict[str, Any]) -> Iterator[str]:
    """The page."""
    excluded = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]
    yield "# Coverage"
    yield ""
    yield f"Written by `make coverage`. {note}".rstrip()
    patterns = ", ".join(f"`{pattern}`" for pattern in excluded["exclude_also"])
    yield f"Not counted are {EXCLUDED} ({patterns})."
    for title, groups in (
        ("room", {name: _of(files, room) for room, name in ROOMS.items()}),
        ("file", {f"`{name}`": [summary] for name, summary in files.items()}),
    ):
        yield ""
        yield f"| {title} | {' | '.join(HEAD)} |"
        yield "|---|" + "---:|" * len(HEAD)
        yield from (row(name, summaries) for name, summaries in groups.items())


def _of(files: dict[str, Any], room: str) -> list[Any]:
    return [summary for name, summary in files.items() if name.split("/")[0] == room]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--note", default="", help="how it was measured, if not by one run")
    print("\n".join(table(parser.parse_args().note, measured())))
