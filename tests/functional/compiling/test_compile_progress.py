"""Progress of compiling: shown when it takes long, part by part, and by one rank only."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchard import jit, repeat
from torchard.functional import torch_internals as internals
from torchard.functional.compiling import compile_progress as progress

WS, X = torch.ones(3, 2, 2), torch.ones(1, 2)


def deep(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A loop between operations before and after it: three parts to compile."""
    return repeat(lambda w, x: torch.tanh(x @ w), ws, x.sin().cos()).exp().sum()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Makes compiling wait until a condition holds, which it must within a minute."""

    def wait_for(shown: Callable[[], bool]) -> None:
        def compile_graph(module: Any, *_: Any) -> Any:
            tick = threading.Event()
            assert any(shown() or tick.wait(0.01) for _ in range(6000))
            return lambda values: list(module(*values))

        monkeypatch.setattr(internals, "compile_graph", compile_graph)
        monkeypatch.setattr(progress, "_PATIENCE", 0.0)
        monkeypatch.setattr(progress, "_REFRESH", 0.01)

    return wait_for


class Bar:
    """Stands for tqdm's."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, **given: Any) -> Bar:
        self.said.append(f"{given['desc']} {given['initial']}/{given['total']}")
        return self

    def refresh(self) -> None:
        if self.said[-1] != "refresh":
            self.said.append("refresh")

    def update(self) -> None:
        self.said.append("update")

    def close(self) -> None:
        self.said.append("close")


def test_a_bar_counts_the_parts(monkeypatch: pytest.MonkeyPatch, compiling: Any) -> None:
    bar = Bar()
    monkeypatch.setattr("tqdm.auto.tqdm", bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compiling(lambda: bool(bar.said) and bar.said[-1] == "refresh")
    assert torch.allclose(jit(deep)(WS, X), deep(WS, X))
    once = ["refresh", "update"]
    assert bar.said == ["compiling deep 0/3", *once, *once, *once, "close"]


def test_without_a_terminal_parts_are_logged(
    caplog: pytest.LogCaptureFixture, compiling: Any
) -> None:
    parts: list[int] = []
    with caplog.at_level(logging.INFO, "torchard.jit"):
        compiling(lambda: len(caplog.messages) > len(parts) and not parts.append(1))  # type: ignore[func-returns-value]
        jit(deep)(WS, X)
    assert caplog.messages == [f"compiling deep: part {i} of 3" for i in (1, 2, 3)]


def test_other_ranks_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiling: Any
) -> None:
    monkeypatch.setenv("RANK", "1")
    compiling(lambda: True)
    with caplog.at_level(logging.INFO, "torchard.jit"):
        jit(deep)(WS, X)
    assert not caplog.messages


def test_a_bar_is_closed_when_compiling_fails(
    monkeypatch: pytest.MonkeyPatch, compiling: Any
) -> None:
    bar = Bar()
    monkeypatch.setattr("tqdm.auto.tqdm", bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compiling(lambda: bool(bar.said))
    whole = internals.compile_graph

    def failing(*given: Any) -> Any:
        whole(*given)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(internals, "compile_graph", failing)
    with pytest.raises(RuntimeError, match="no compiler"):
        jit(deep)(WS, X)
    assert bar.said[-1] == "close"


def test_quick_compilations_are_silent(caplog: pytest.LogCaptureFixture, compiling: Any) -> None:
    compiling(lambda: True)
    progress._PATIENCE = 1e6
    with caplog.at_level(logging.INFO, "torchard.jit"):
        jit(deep)(WS, X)
    assert not caplog.messages
