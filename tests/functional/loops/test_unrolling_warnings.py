"""A pattern that may tell the layers of a loop apart unrolls it, and says so once, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse

from torchard import (
    Mesh,
    UnrolledLoopWarning,
    accumulate,
    checkpoint,
    full,
    jit,
    pipeline,
    repeat,
)
from torchard.functional.programs.unrolled import has_loops

WS, X = torch.linspace(-1, 1, 12).reshape(3, 2, 2), torch.ones(4, 2)


def layers(ws: Any, x: torch.Tensor) -> torch.Tensor:
    return repeat(lambda w, x: torch.nn.functional.silu(x @ w) * x, ws, x).sum()


WITH_PATTERNS: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda where: checkpoint(layers, where=where),
    "fuse": lambda where: fuse(layers, where=where, compiler="eager"),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "outside": lambda fn: fn,
    "inside": lambda fn: jit(fn, backend="eager"),
    "in a function": lambda fn: jit(lambda ws, x: 2 * fn(ws, x) / 2, backend="eager"),
    "in a gradient": lambda fn: jit(lambda ws, x: torch.func.grad(fn, 1)(ws, x).sum(), backend="eager"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", WITH_PATTERNS)
def test_a_pattern_that_tells_layers_apart_is_named(transform: str, place: str) -> None:
    run = PLACES[place](WITH_PATTERNS[transform]("block/1"))
    with pytest.warns(UnrolledLoopWarning) as caught:
        value = run(WS, X)
        run(WS, X[:2])
    (warning,) = [w for w in caught if w.category is UnrolledLoopWarning]
    assert f"{transform}(where='block/1')" in str(warning.message)
    assert "write 'block/*'" in str(warning.message)
    torch.testing.assert_close(value, PLACES[place](layers)(WS, X))


def test_microbatches_and_pipelines_unroll_without_a_warning() -> None:
    """There is nothing that a user could do instead; the program's text says it."""
    mesh = Mesh({"pp": 1}, virtual=True)
    runs = {
        "Accumulate": accumulate(layers, 2, batch=(None, 0)),
        "Pipeline": pipeline(layers, mesh, "pp", microbatches=2, batch=(None, 0)),
    }
    for name, run in runs.items():
        first = str(run.lower(WS, X)).partition("\n")[0]
        assert first == f"def layers:  # unrolled: <lambda> × 3, for {name}"
        torch.testing.assert_close(full(run(WS, X)), layers(WS, X))


@pytest.mark.parametrize("transform", WITH_PATTERNS)
def test_a_pattern_for_all_layers_keeps_the_loop(transform: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert has_loops(WITH_PATTERNS[transform]("block/*").lower(WS, X))
