"""Equal layers of a Python loop become a loop, and the unrolled loop is the program it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.func import grad, grad_and_value

import torchard as ta
from torchard import checkpoint, jit, name, optim, policies, scope, trace
from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.loops import equal_layers as limits
from torchard.functional.loops.periods import runs
from torchard.functional.loops.recognised import numbered, recognised
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, ORIGIN, SCOPE, SOURCE, VAL
from torchard.functional.programs.unrolled import has_loops, unrolled

Tensor = torch.Tensor
F64 = torch.float64
WIDTH = 3


@pytest.fixture(autouse=True)
def few_operations_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are rolled, too."""
    monkeypatch.setattr(limits, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(limits, "MIN_SAVED", 1)


def params(count: int, shape: tuple[int, ...] = (WIDTH, WIDTH)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=F64) / 2 for _ in range(count)]


X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)


# -- programs ---------------------------------------------------------------------------------------


def plain(ws: Any, x: Tensor) -> Any:
    for w in ws:
        x = torch.tanh(x @ w) + x
    return x.square().sum()


def scoped(ws: Any, x: Tensor) -> Any:
    for i, w in enumerate(ws):
        with scope(f"layers.{i}"):
            x = name(torch.tanh(x @ w) + x, "stream")
    return x.square().sum()


def every_layer_is_returned(ws: Any, x: Tensor) -> Any:
    kept = []
    for w in ws:
        x = torch.tanh(x @ w) + x
        kept.append(x)
    return sum(each.sin().sum() for each in kept)


def by_turns(ws: Any, x: Tensor) -> Any:
    for i, w in enumerate(ws):
        x = torch.tanh(x @ w) if i % 2 else torch.sin(x @ w) * x
    return x.sum()


def first_is_special(ws: Any, x: Tensor) -> Any:
    bias = None
    for w in ws:
        y = x @ w
        bias = torch.cos(y) if bias is None else bias
        x = torch.tanh(y + bias)
    return x.sum()


def weights_are_shared(ws: Any, x: Tensor) -> Any:
    for w in ws:
        x = torch.tanh(x @ w + x @ ws[0])
    return x.sum()


def two_carries(ws: Any, x: Tensor) -> Any:
    y = x.cos()
    for w in ws:
        x, y = torch.tanh(y @ w) + x, torch.sin(x) * y
    return (x * y).sum()


def encoder_and_decoder(ws: Any, x: Tensor) -> Any:
    half = len(ws) // 2
    y = x
    for w in ws[:half]:
        y = torch.tanh(y @ w)
    for w in ws[half:]:
        x = torch.sin(x @ w) + y
    return x.sum()


def residuals_of_two_layers_before(ws: Any, x: Tensor) -> Any:
    before = x
    for w in ws:
        x, before = torch.tanh(x @ w) + before, x
    return x.sum()


def written_rows(ws: Any, x: Tensor) -> Any:
    total = torch.zeros(len(ws), dtype=F64)
    for i, w in enumerate(ws):
        x = torch.tanh(x @ w)
        total[i] = x.sum()
    return total.sum()


PROGRAMS = [
    plain,
    scoped,
    every_layer_is_returned,
    by_turns,
    first_is_special,
    weights_are_shared,
    two_carries,
    encoder_and_decoder,
    residuals_of_two_layers_before,
    written_rows,
]


def training_step(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    def step(ws: Any, moments: Any, x: Tensor) -> Any:
        grads, value = grad_and_value(loss)(ws, x)
        return *optim.adamw(0.1).update(grads, moments, ws), value

    return step


KINDS: dict[str, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "forward": lambda f: (f, (params(8), X)),
    "gradient": lambda f: (grad(f, (0, 1)), (params(8), X)),
    "second": lambda f: (grad(lambda ws, x: grad(f, 1)(ws, x).square().sum()), (params(6), X)),
    "training": lambda f: (
        training_step(f),
        (params(8), optim.adamw(0.1).init(params(8)), X),
    ),
}


def facts(program: Program) -> list[Any]:
    """All that a program's nodes are, by number; sums of several terms are in any order."""
    number = {node: i for i, node in enumerate(program.graph.nodes)}

    def fact(node: fx.Node) -> Any:
        args = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{number[operand]}")
        val = VAL.get(node)
        shape = tuple(val.shape) if isinstance(val, Tensor) else None
        return node.op, str(node.target), repr(args), shape, SCOPE.get(node), SOURCE.get(node)

    return [fact(node) for node in program.graph.nodes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda f: f.__name__)
def test_the_unrolled_loop_is_the_program(loss: Any, kind: str) -> None:
    """Node by node; but for sums over layers, which are added up by themselves."""
    fn, args = KINDS[kind](loss)
    program = trace(fn)(*args)
    rolled = recognised(program)
    again = unrolled(rolled)
    summed = any(node.target.__name__ == "total" for node in rolled.calls)  # type: ignore[union-attr]
    assert Counter(str(n.target) for n in again.calls) == Counter(str(n.target) for n in program.calls)
    if not summed:
        assert facts(again) == facts(program)
        have, want = (len({ORIGIN.get(node) for node in p.calls}) for p in (again, program))
        assert have >= want
    assert not has_loops(again)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda f: f.__name__)
def test_values(loss: Any, kind: str) -> None:
    fn, args = KINDS[kind](loss)
    torch.testing.assert_close(jit(fn, backend="eager")(*args), fn(*args), rtol=1e-10, atol=1e-12)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("loss", [plain, scoped, by_turns, two_carries], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_as_long_whatever_the_depth(loss: Any, kind: str) -> None:
    """But for the inputs, and what is listed and taken of lists."""

    def operations(count: int) -> int:
        fn, args = KINDS[kind](loss)
        ws = params(count)
        args = tuple(ws if a is args[0] else a for a in args)
        if kind == "training":
            args = ws, optim.adamw(0.1).init(ws), X
        rolled = recognised(trace(fn)(*args))
        markers = ("item", "listed", "rows", "row")
        return sum(getattr(node.target, "__name__", "") not in markers for node in rolled.calls)

    assert operations(12) == operations(24)


def test_what_is_the_same_for_all_layers_and_what_is_not() -> None:
    program = recognised(trace(grad(scoped))(params(5), X))
    loops = {LOOP.of(node) for node in program.calls if LOOP.on(node)}
    assert {(loop.count, loop.reverse, loop.name) for loop in loops} == {
        (4, False, "layers.{1+i}"),  # x has no gradient: the first layer is left out
        (4, True, "layers.{1+i}"),
    }
    assert not has_loops(recognised(trace(scoped)(params(2), X)))


def test_other_sources_shapes_and_constants_are_other_layers() -> None:
    def scales(ws: Any, x: Tensor) -> Tensor:
        for i, w in enumerate(ws):
            x = torch.tanh(x @ w) * (i + 0.5)
        return x

    assert not has_loops(recognised(trace(scales)(params(5), X)))
    mixed = [w[:, : 2 + i % 2] @ w[: 2 + i % 2] for i, w in enumerate(params(5))]
    low = [w.float().double() if i % 2 else w for i, w in enumerate(params(5))]
    assert has_loops(recognised(trace(plain)(mixed, X)))
    assert has_loops(recognised(trace(plain)(low, X)))


def test_a_checkpoint_keeps_what_it_does_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> list[Any]:
        run = checkpoint(scoped, policy=policies.save_dots, where="layers.*")
        found = ta.saved_residuals(run, params(6), X)
        return sorted((r.what, r.scope, r.name or "", r.bytes, r.why) for r in found)

    rolled = kept()
    monkeypatch.setattr(limits, "MIN_SAVED", 10**6)
    assert rolled == kept()


def test_numbers_of_layers() -> None:
    for names in (["h.0", "h.1", "h.2"], ["h.3", "h.4"], ["h.1", "h.3", "h.5"], ["h.1", "h.2", "h.4"]):
        one = numbered(names)
        assert [in_iteration(one, i) for i in range(len(names))] == names
    assert numbered(["a", "a"]) == "a"


@settings(max_examples=200, deadline=None)
@given(
    period=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    times=st.integers(3, 6),
    before=st.lists(st.integers(6, 9), max_size=5),
    after=st.lists(st.integers(6, 9), max_size=5),
)
def test_periods_are_found(period: list[int], times: int, before: list[int], after: list[int]) -> None:
    """All of a repeated word is in a run, if it is long enough for words of four symbols to repeat."""
    symbols = [*before, *period * times, *after]
    found = runs(symbols, 3, 1)
    covered = set[int]()
    for run in found:
        assert all(symbols[i] == symbols[i - run.period] for i in range(run.start + run.period, run.stop))
        assert run.count >= 3 and covered.isdisjoint(range(run.start, run.stop))
        covered.update(range(run.start, run.stop))
    if len(period) >= 4 and len(set(period)) == len(period):
        assert covered.issuperset(range(len(before), len(before) + len(period) * times))
