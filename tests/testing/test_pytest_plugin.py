"""The fixtures of torchard.testing in a project of their own."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest

CONFTEST = 'pytest_plugins = ["torchard.testing.pytest_plugin"]'
TESTS = """
import torch
from hypothesis import given, settings, strategies as st
from torchard import random

def test_mesh(virtual_mesh):
    assert virtual_mesh(dp=2, tp=3).shape == {"dp": 2, "tp": 3}

def test_seed(torchard_seed, torchard_key):
    print("seed", torchard_seed, "draw", torch.rand(()).item())
    assert torch.equal(torchard_key, random.key(torchard_seed))

@settings(database=None, max_examples=3)
@given(st.integers(0, 10**9))
def test_property(n):
    print("drew", n)
"""


def lines(folder: Path, *args: str) -> list[str]:
    """What a run of the tests prints of seeds and draws."""
    options = ["-s", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    script = Path(pytest.__file__).parent / "__main__.py"
    done = forked.run([str(script), *options], folder, seconds=60, stderr=folder / "stderr")
    assert "3 passed" in done.stdout, f"{done.stdout}{done.stderr}"
    found = (line.split(" .")[-1].lstrip(".") for line in done.stdout.splitlines())
    return [line for line in found if line.startswith(("torchard seed", "seed", "drew"))]


def test_a_seed_is_printed_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TESTS)
    first = lines(tmp_path)
    (seed,) = re.findall(r"torchard seed: (\d+)", first[0])
    again, third = (lines(tmp_path, f"--torchard-seed={seed}") for _ in range(2))
    assert again == third and len(again) == len(first) == 5
    assert again[:2] == first[:2], "hypothesis takes the seed only if it is asked for"
