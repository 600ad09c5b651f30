"""A fixed part of the operator sweep (``make sweep`` runs all of it), and that it can fail."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from op_db import Case, cases, entries, name_of
from op_sweep import BROKEN, REFUSED, RIGHT, WRONG, Seen, Verdict, judge, sweep, watched

from torchard.sharding.rules import REGISTRY
from torchard.sharding.rules.registry import OpRule

aten = torch.ops.aten
PARTS = 4


def _entry(name: str) -> Any:
    return next(e for e in entries() if name_of(e) == name)


@pytest.mark.parametrize("part", range(PARTS))
def test_one_sample_of_every_sixteenth_entry(part: int) -> None:
    chosen = entries()[16 * part :: 16 * PARTS]
    bad = [v for _, v in sweep(chosen, 1, 1, 8) if v.kind in (WRONG, BROKEN)]
    assert not bad, "\n".join(f"{v.kind}: {v.case} {v.where}\n{v.why}" for v in bad)


def test_torchs_table_leaves_the_profile_of_hypothesis(request: pytest.FixtureRequest) -> None:
    """Otherwise all tests that follow would draw other examples, and as many as `make explore`."""
    entries()
    wanted = request.config.getoption("--hypothesis-profile") or "ci"
    assert settings.get_current_profile_name() == wanted


def _verdicts(name: str) -> list[Verdict]:
    return [judge(case, Random(i)) for case in cases(_entry(name)) for i in range(4)]


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {v.kind for v in _verdicts("softmax")} == {RIGHT}
    monkeypatch.setitem(REGISTRY, aten._softmax.default, OpRule("... -> ..."))
    assert WRONG in {v.kind for v in _verdicts("softmax")}


def test_a_misfit_rule_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, aten._softmax.default, OpRule("a b c d e f -> a"))
    assert {v.kind for v in _verdicts("softmax")} == {BROKEN}


def test_what_torchard_refuses_is_told_apart() -> None:
    assert {v.kind for v in _verdicts("bernoulli")} == {REFUSED}


def test_how_operations_were_planned_is_seen() -> None:
    case, seen = next(cases(_entry("histc"))), Seen()
    both = [case, Case(_entry("sin"), next(_entry("sin").sample_inputs("cpu", torch.float64)))]
    with watched(seen):
        for c in both:
            judge(c, Random(0))
    assert "aten.histc.default" in seen.gathered
    assert "aten.sin.default" in seen.ruled
