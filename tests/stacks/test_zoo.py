"""A sample of HuggingFace's families, as `make zoo` runs them: gradients equal those of plain torch."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")

from zoo import CHECKS, FAMILIES, Case

SAMPLE = [
    ("GPT-2", "hidden states"),
    ("BLOOM", "checkpoint"),
    ("Mixtral", "fully sharded"),
    ("Gemma", "stacked"),
    ("ALBERT", "dp × tp"),
    ("ALBERT", "hidden states"),
    ("ResNet", "fully sharded"),
    ("SegFormer", "hidden states"),
]


@functools.cache
def case(family: str) -> Case:
    return Case(FAMILIES[family]())


@pytest.mark.parametrize(("family", "check"), SAMPLE)
def test_equals_plain_torch(family: str, check: str) -> None:
    assert CHECKS[check](case(family)) == "equal"
