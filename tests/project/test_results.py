"""A table of results says nothing of a library that has become another since.

Not told by commits, which a shallow clone lacks, and most of which change little: by the files and their
statements, which the table lists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from paths import RESULTS, ROOT

ROOMS = ("functional", "sharding", "kernels", "src/torchard/testing")
# What may change before coverage has to be measured again: files that are new or gone, and statements
# of files that have grown or shrunk, as parts of all of them.
FILES, STATEMENTS = 0.25, 0.35
ROW = re.compile(r"^\| `(\S+\.py)` \| ([\d,]+) \|", re.M)


def listed() -> dict[str, int]:
    """The statements of each file, by the table."""
    text = (RESULTS / "coverage.md").read_text()
    return {name: int(count.replace(",", "")) for name, count in ROW.findall(text)}


def today() -> dict[str, int]:
    """The statements of each file, as nearly as that can be said without coverage."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {str(path.relative_to(ROOT)): statements(path) for path in paths}


def statements(path: Path) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))


def moved(then: dict[str, int], now: dict[str, int]) -> tuple[float, float]:
    """The parts of the library's files that are new or gone, and of its statements that are."""
    both = then.keys() & now.keys()
    scale = sum(now[n] for n in both) / max(1, sum(then[n] for n in both))  # two ways to count
    grown = sum(abs(now[n] - scale * then[n]) for n in both)
    new = sum(now[n] for n in now.keys() - both)
    return len(then.keys() ^ now.keys()) / len(now), (grown + new) / sum(now.values())


def test_coverage_is_of_this_library() -> None:
    files, changed = moved(listed(), today())
    assert files <= FILES and changed <= STATEMENTS, (
        f"since tests/results/coverage.md was written, {files:.0%} of the library's files and "
        f"{changed:.0%} of its statements have changed: run make coverage"
    )


def test_what_has_changed_is_seen() -> None:
    then = {f"{number}.py": 100 for number in range(20)}
    assert moved(then, dict.fromkeys(then, 110)) == pytest.approx((0, 0))  # counted in another way
    assert moved(then, then | {"0.py": 1000})[1] > STATEMENTS > moved(then, then | {"0.py": 120})[1]
    renamed = {f"new/{name}" if number < 3 else name: 100 for number, name in enumerate(then)}
    assert moved(then, renamed)[0] > FILES > moved(then, then | {"new.py": 50})[0]
