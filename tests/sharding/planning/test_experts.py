"""Programs as other people write them send what an expert would; those that send more are listed.

The programs, and the bytes of an expert with their derivations, are those of `benchmarks/experts.py`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
from paths import BENCHMARKS

# What stands in the way of the expert's plan.
MORE = {
    "Muon, rows split": "ranks would repeat the products of what was split",
    "Muon step, fully sharded": "an axis that splits parameters and a batch is planned by rules",
    "Llama, 2 layers, last dims split, gradient of inputs": "halves of q and k are summed apart",
    "SimCLR": "logits are gathered, that their diagonal is written",
    "ResNet block, group norm, height split": "a kernel's gradient fetches the input's rows again",
    "causal convolution, time split": "padding and convolution fetch a window each",
    "convolutions, time split, gradient": "a kernel's gradient fetches the input's rows again",
}


def _experts() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("experts")
    finally:
        sys.path.remove(str(BENCHMARKS))


EXPERTS = _experts()


@pytest.mark.filterwarnings("ignore::torchard.IdleAxisWarning")
@pytest.mark.parametrize("case", EXPERTS.CASES, ids=lambda case: case.name)
def test_sends_what_an_expert_would(case: Any) -> None:
    result = EXPERTS.measured(case)
    assert result.good == (case.name not in MORE), str(result)
    assert EXPERTS.deviation(case) < EXPERTS.TOLERANCE


def test_all_exceptions_are_cases() -> None:
    assert {case.name for case in EXPERTS.CASES} >= MORE.keys()
