"""The laws of control flow, rules, solvers and checks: `make laws` takes thirty times as many words."""

from __future__ import annotations

import pytest
from control_laws import FUNCTIONS, outcome, words
from effort import examples


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_word_equals_the_plain_function(name: str) -> None:
    for function, word, mesh, dtype in words(examples(ci=1000, explore=30), seed=1):
        if function == name:
            outcome(function, word, mesh, dtype)
