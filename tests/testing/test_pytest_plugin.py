"""The fixtures of torchard.testing in a project of their own."""

from __future__ import annotations

import re

import pytest

pytest_plugins = ["pytester"]

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


def lines(pytester: pytest.Pytester, *args: str) -> list[str]:
    result = pytester.runpytest_subprocess("-s", "-p", "no:cacheprovider", *args)
    result.assert_outcomes(passed=3)
    found = (line.split(" .")[-1].lstrip(".") for line in result.outlines)
    return [line for line in found if line.startswith(("torchard seed", "seed", "drew"))]


def test_a_seed_is_printed_and_replayed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    first = lines(pytester)
    (seed,) = re.findall(r"torchard seed: (\d+)", first[0])
    again, third = (lines(pytester, f"--torchard-seed={seed}") for _ in range(2))
    assert again == third and len(again) == len(first) == 5
    assert again[:2] == first[:2], "hypothesis takes the seed only if it is asked for"
