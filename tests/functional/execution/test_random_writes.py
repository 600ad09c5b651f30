"""Random programs that write in place: right numbers, and nothing else is written (write_checks.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from random_writes import CLOSED, AsValues, InPlace, Program, Step, programs
from write_cases import AT, DERIVED, Case, cases
from write_checks import Wrong, check

ALLOWED = ("right", "too large", "rounded", "torch refuses")


@settings(max_examples=30)
@given(programs())
def test_the_reference_is_what_torch_computes(program: Program) -> None:
    _, *values = Case(program).arguments(0)
    have = program.by(InPlace)(CLOSED, *(v.clone() for v in values), AT)
    want = program.by(AsValues)(CLOSED, *values, AT)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True)), program


@settings(max_examples=80)
@given(cases(derived=["value"]))
def test_calls(case: Case) -> None:
    note(str(case))
    assert check(case) in ALLOWED


@settings(max_examples=25)
@given(cases(derived=[name for name in DERIVED if name != "value"]))
def test_derivatives(case: Case) -> None:
    note(str(case))
    assert check(case) in ALLOWED


# -- the check itself -----------------------------------------------------------------------------------

SUM = Program((Step("y + o", 0, 1),), (0,))  # x and y


def wrong(monkeypatch: pytest.MonkeyPatch, run: Any, **options: Any) -> str:
    """What the check says of a function that is run instead of that of SUM."""
    monkeypatch.setattr(Case, "subject", lambda case: run)
    with pytest.raises(Wrong) as caught:
        check(Case(SUM, **options))
    return str(caught.value)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1st call: result 0 is" in wrong(monkeypatch, lambda x, y, z, at: (y + x + 1,))


def test_a_written_argument_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "argument 1 was written" in wrong(monkeypatch, lambda x, y, z, at: (y.add_(x),))


def test_written_memory_of_a_donated_view_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = wrong(
        monkeypatch,
        lambda x, y, z, at: (y.add_(x),),
        placed="in one storage",
        donated=frozenset({1}),
    )
    assert "the caller's memory was written" in text


def test_a_held_view_of_a_donated_argument_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda x, y, z, at: (y.add_(x),)  # noqa: E731
    text = wrong(monkeypatch, run, holds=True, donated=frozenset({1}))
    assert "a view of argument 1 was written" in text


def test_a_result_that_the_next_call_writes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.zeros(4, 4, dtype=torch.float64)
    text = wrong(monkeypatch, lambda x, y, z, at: (torch.add(x, y, out=buffer),))
    assert "result" in text
