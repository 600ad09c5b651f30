"""Donation to programs of regions: each layer's results are written over that layer's arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import HOLDERS, block, cloned, layers, same, tensor_of
from torch import Tensor

from torchard import jit, repeat, stack
from torchard.functional.loops import equal_layers

Params = dict[str, Any]


@pytest.fixture(autouse=True)
def small_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers are found in small programs, too."""
    monkeypatch.setattr(equal_layers, "MIN_SAVED", 1)
    monkeypatch.setattr(equal_layers, "MIN_SAVED_PER_LOOP", 1)


def loss(params: Params, x: Tensor) -> Tensor:
    for p in params["layers"]:
        x = block(p, x)
    return (x @ params["head"]).square().mean()


def stacked_loss(params: Params, x: Tensor) -> Tensor:
    x = repeat(block, stack(params["layers"]), x)
    return (x @ params["head"]).square().mean()


def step(params: Params, x: Tensor, loss: Callable[..., Tensor] = loss) -> tuple[Params, Tensor]:
    grads, value = torch.func.grad_and_value(loss)(params, x)
    return _less(params, grads), value


def _less(params: Any, grads: Any) -> Any:
    if isinstance(params, dict):
        return {k: _less(params[k], grads[k]) for k in params}
    if isinstance(params, list):
        return [_less(p, g) for p, g in zip(params, grads, strict=True)]
    return params - params * 0.01 - grads  # reads each twice


def weights(count: int = 4) -> Params:
    return {"layers": layers(count), "head": torch.eye(16) / 4}


def places(params: Params) -> list[int]:
    rows = [p[name].data_ptr() for p in params["layers"] for name in ("a", "b")]
    return [*rows, params["head"].data_ptr()]


def donating(fn: Callable[..., Any]) -> Any:
    return jit(fn, donate_argnums=0)


BATCH = torch.arange(128.0).reshape(8, 16) / 128


@pytest.mark.parametrize("loss", [loss, stacked_loss])
def test_results_are_written_over_arguments(loss: Callable[..., Tensor]) -> None:
    """Over the rows that a loop reads, or all after it: every parameter stays where it is."""

    def update(params: Params, x: Tensor) -> tuple[Params, Tensor]:
        return step(params, x, loss)

    run, plain, params = donating(update), jit(update), weights()
    want, before = cloned(params), places(params)
    for _ in range(4):
        params, value = run(params, BATCH)
        want, wanted = plain(want, BATCH)
        assert torch.equal(value, wanted) and same(params, want)
        assert places(params) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("holder", HOLDERS)
def test_rows_that_others_hold(holder: str, first: int) -> None:
    """At the first call, which is compiled for it, or at a later one: a copy is written over."""
    run, plain = donating(step), jit(step)
    for _ in range(first):
        run(weights(), BATCH)
    for _ in range(2):
        params, kept = weights(), weights()
        row = params["layers"][1]["a"]
        held = HOLDERS[holder](row)
        assert same(run(params, BATCH), plain(kept, BATCH))
        if held is not row:  # which may not be used
            rest = tensor_of(held)
            assert torch.equal(rest, kept["layers"][1]["a"][: len(rest)])


READERS: dict[str, Callable[[Params, Params], Any]] = {
    "an argument": lambda old, new: old["layers"][0]["a"],
    "a view of one": lambda old, new: old["layers"][2]["b"].t(),
    "a cosine of one": lambda old, new: (old["layers"][2]["a"] * new["head"].sum()).cos(),
    "a sum over the layers": lambda old, new: sum(p["a"].sum() for p in old["layers"]),
    "the difference": lambda old, new: (new["layers"][3]["a"] - old["layers"][3]["a"], old["head"] + 1),
}


@pytest.mark.parametrize("reader", READERS)
def test_arguments_that_are_read_after_the_loop(reader: str) -> None:
    def f(params: Params, x: Tensor) -> Any:
        new, value = step(params, x)
        return new, value, READERS[reader](params, new)

    run, plain = donating(f), jit(f)
    for _ in range(4):
        assert same(run(weights(), BATCH), plain(weights(), BATCH))


def test_a_layer_that_is_repeated() -> None:
    """One parameter is the row of two iterations: neither is written over it."""

    def f(params: Params, x: Tensor) -> tuple[list[Tensor], Tensor]:
        first, second, *_ = params["layers"]
        tied = {**params, "layers": [first, second, first, second]}
        new, value = step(tied, x)
        return [p["a"] for p in new["layers"]], value

    run, plain = donating(f), jit(f)
    for _ in range(4):
        assert same(run(weights(2), BATCH), plain(weights(2), BATCH))


@pytest.mark.parametrize("reader", [None, *READERS])
def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch, reader: str | None) -> None:
    """What a region is to write over is the program's own when it runs."""

    def f(params: Params, x: Tensor) -> Any:
        new, value = step(params, x)
        return new, value, READERS[reader](params, new) if reader else None

    module = importlib.import_module("torchard.functional.jit")
    seen = []
    before = module.own

    def own(parts: list[Tensor], donated: list[int]) -> None:
        kept = list(map(id, parts))
        before(parts, donated)
        seen.append((len(donated), sum(id(x) != i for x, i in zip(parts, kept, strict=True))))

    monkeypatch.setattr(module, "own", own)
    run = donating(f)
    for _ in range(4):
        run(weights(), BATCH)
    assert not any(copies for _, copies in seen)
    assert reader or sum(count for count, _ in seen) == 4 * len(places(weights()))
