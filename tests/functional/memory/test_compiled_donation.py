"""Donation to compiled programs: results are written over arguments, and nothing else.

Inductor's code writes over an argument where a fused kernel is the last to read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from inductor_cache import last_lines
from planned import HOLDERS, cloned, same, tensor_of
from torch import Tensor

from torchard import DonatedError, jit
from torchard.functional.torch_internals import donated_buffers
from torchard.testing.strategies import RandomProgram, programs


def donating(fn: Callable[..., Any], *numbers: int) -> Any:
    return jit(fn, donate_argnums=numbers or 0)


def update(w: Tensor, g: Tensor) -> Tensor:
    return w - 0.5 * g * g


def weight(*shape: int) -> Tensor:
    return (
        torch.arange(float(torch.Size(shape).numel())).reshape(shape).clone()
    )  # no view of another


# -- where results are ------------------------------------------------------------------------------


def test_a_result_is_written_over_its_argument() -> None:
    """In the same memory for ever, as a tensor of its own: no view of the argument."""
    run, w, g = donating(update), weight(16, 16), torch.ones(16, 16)
    place = w.data_ptr()
    for _ in range(4):
        want = update(w, g)
        before, w = w, run(w, g)
        assert torch.equal(w, want)
        assert w.data_ptr() == place
        assert not w._is_view()
        with pytest.raises(DonatedError):
            before.sum()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.reshape(2, 2, 8, 8).contiguous(memory_format=torch.channels_last),
    "a scalar": lambda x: x.sum(),
    "of ones": lambda x: x[:1, :1].clone(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_arguments(layout: str) -> None:
    """What has no gaps is written over, in whatever order its elements are."""
    run, w = donating(update), LAYOUTS[layout](weight(16, 16)).clone()
    g = torch.ones_like(w)
    for _ in range(4):
        want, place = update(w, g), w.data_ptr()
        w = run(w, g)
        assert torch.equal(w, want) and w.stride() == want.stride()
        assert w.data_ptr() == place


def test_a_result_that_cannot_be_written_over_its_argument() -> None:
    """A reduction of all of it, then a product."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        return w @ x / w.sum()

    run, w, x = donating(f), torch.eye(32) + 1, torch.eye(32) * 2
    for _ in range(4):
        want = f(w, x)
        w = run(w, x)
        torch.testing.assert_close(w, want)


# -- what others hold -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("holder", HOLDERS)
def test_arguments_that_others_hold(holder: str, first: int) -> None:
    """At the first call, which is compiled for it, or at a later one: a copy is written over."""
    run, g = donating(update), torch.ones(4, 8)
    for _ in range(first):
        run(weight(4, 8), g)
    for _ in range(2):
        w = weight(4, 8)
        held = HOLDERS[holder](w)
        assert torch.equal(run(w, g), update(weight(4, 8), g))
        if held is not w:  # which may not be used
            rest = tensor_of(held)
            assert torch.equal(rest, weight(4, 8)[: len(rest)])


def test_arguments_in_one_memory() -> None:
    """Two that are donated, one of which the other is a part of; one beside an argument that is not."""
    both = donating(lambda a, b: (a * 2, b * 3), 0, 1)
    one = donating(lambda a, b: (a * 2, a.sum() + b), 0)
    for _ in range(3):
        for run in (both, one):
            plain = jit(run.fn)
            for make in (
                lambda w: (w[:2], w[1:]),
                lambda w: (w[:2], w[2:]),
                lambda w: (w[2:], w[:2]),
            ):
                assert same(run(*make(weight(4, 4))), plain(*make(weight(4, 4))))


def test_elements_that_share_memory() -> None:
    """No result has their layout, and a copy has another: none is made, whatever holds them."""
    run, g = donating(update), torch.ones(2, 2)
    for held in (False, True, False, True, False):
        w = torch.empty(0).set_(
            weight(4).untyped_storage(), 0, (2, 2), (1, 1)
        )  # of the size of four
        _view = w[0] if held else None
        assert torch.equal(run(w, g), update(torch.tensor([[0.0, 1.0], [1.0, 2.0]]), g))


def test_memory_that_torch_does_not_own() -> None:
    array = weight(4, 8).numpy()
    run, g = donating(update), torch.ones(4, 8)
    for _ in range(3):
        assert torch.equal(run(torch.from_numpy(array), g), update(weight(4, 8), g))
        assert torch.equal(torch.from_numpy(array), weight(4, 8))
    shared = weight(4, 8).share_memory_()
    other = torch.empty(0).set_(shared.untyped_storage(), 0, (4, 8))
    del other
    assert torch.equal(run(shared, g), update(weight(4, 8), g))


def test_results_that_are_the_argument() -> None:
    """The argument and views of it are returned beside what could be written over it."""
    run = donating(lambda w, g: (w, w.view(-1), w[1:], w + g))
    for _ in range(3):
        results = run(weight(4, 8), torch.ones(4, 8))
        w = weight(4, 8)
        assert same(results, (w, w.view(-1), w[1:], w + 1))


def test_results_of_an_earlier_call() -> None:
    """What a call returned, and its views, is no argument's any more unless it is donated itself."""
    run, g = donating(update), torch.ones(4, 8)
    first = run(weight(4, 8), g)
    kept, view = first.clone(), first[1:]
    second = run(first, g)
    assert torch.equal(view, kept[1:])
    assert torch.equal(second, update(kept, g))


@settings(max_examples=examples(ci=4, explore=100), deadline=None)
@given(programs(), st.data())
def test_random_programs(program: RandomProgram, data: st.DataObject) -> None:
    """Any arguments donated, any of these held by views: values are right, and what is held stays."""
    count = len(program.inputs)
    numbers = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True), "donated")
    held = data.draw(st.sets(st.sampled_from(numbers)), "held")
    run, plain = donating(program, *numbers), jit(program)
    for delta in range(4):
        inputs = cloned([x + delta if x.is_floating_point() else x for x in program.inputs])
        views = [inputs[i].view(-1) for i in held]
        kept, want = cloned(views), plain(*cloned(inputs))
        others = [inputs[i] for i in range(count) if i not in numbers]
        before = cloned(others)
        assert same(run(*inputs), want)
        assert same(views, kept) and same(others, before)


# -- under transforms -------------------------------------------------------------------------------

UNDER: dict[str, Callable[[Callable[..., Any], Tensor, Tensor], Any]] = {
    "vmap": lambda f, w, g: torch.vmap(f)(w, g),
    "grad": lambda f, w, g: torch.func.grad(lambda w: f(w, g).square().sum())(w),
    "jvp": lambda f, w, g: torch.func.jvp(f, (w, g), (g, w)),
    "jacrev": lambda f, w, g: torch.func.jacrev(f)(w, g),
    "hessian": lambda f, w, g: torch.func.hessian(lambda w: f(w, g).square().sum())(w),
}


@pytest.mark.parametrize("transform", UNDER)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_transforms_keep_what_is_donated(transform: str, backend: str) -> None:
    """Values of a transform may be needed again, and are left as they are."""
    run, w, g = jit(update, donate_argnums=0, backend=backend), weight(2, 3), torch.ones(2, 3)
    have = UNDER[transform](run, w, g)
    torch.testing.assert_close(have, UNDER[transform](update, w, g))
    assert torch.equal(w, weight(2, 3))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inference_tensors(backend: str) -> None:
    """Torch writes to one in inference mode only; outside of it, it is left as it is."""
    run, g = jit(update, donate_argnums=0, backend=backend), torch.ones(4, 8)
    for _ in range(3):
        with torch.inference_mode():
            w, inside = weight(4, 8), weight(4, 8)
            result = run(inside, g)
        assert torch.equal(result, update(weight(4, 8), g))
        assert torch.equal(run(w, g), update(weight(4, 8), g))
        assert torch.equal(w, weight(4, 8))
        with pytest.raises(DonatedError):
            inside.sum()


# -- Inductor's graphs and caches --------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "donates"), [(2, True), (3, False)])
def test_positions_are_those_of_the_graph(
    inputs: int, donates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where AOTAutograd has added an input, such as a token of an effect, positions are of others."""
    facts, seen = SimpleNamespace(bw_donated_idxs=None), []
    context = SimpleNamespace(try_get=lambda: SimpleNamespace(fw_metadata=facts))
    monkeypatch.setattr(torch._guards, "TracingContext", context)
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda *_, **options: seen.append(options))
    graph = torch.fx.symbolic_trace(lambda a, b: a + b)
    with donated_buffers.donating([1], 2) as compile_inner:
        compile_inner(graph, [torch.ones(1)] * inputs)
    assert seen == [{"is_backward": True} if donates else {}]
    assert facts.bw_donated_idxs == ([1] if donates else None)


def test_programs_that_differ_in_donation_share_no_code(tmp_path: Path) -> None:
    """In one process, and in the next, which finds the code of the first on disk."""
    code = """
import torch
import torch._inductor.config as config
from torch._dynamo.utils import counters
from torchard import jit

config.cpp.vec_isa_ok = True  # to find out takes longer than the rest

def f(a, b):
    return a * 2 + 1, b - 3

for numbers in ((), 0, 1, (0, 1), 0):
    run = jit(f, donate_argnums=numbers)
    given = (numbers,) if isinstance(numbers, int) else numbers
    for _ in range(3):
        a, b = torch.arange(8.0), torch.ones(8)
        want, places = f(a, b), [(a, b)[i].data_ptr() for i in given]
        results = run(a, b)
        assert all(map(torch.equal, results, want))
        assert 0 in given or torch.equal(a, torch.arange(8.0))
        assert 1 in given or torch.equal(b, torch.ones(8))
        assert {x.data_ptr() for x in results}.issuperset(places)
print(*(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("miss", "hit", "bypass")))
"""
    assert last_lines(code, tmp_path) == ["4 1 0", "0 5 0"]


@pytest.mark.parametrize(
    "how", [{}, {"backend": "eager"}, {"backend": "eager", "memory": "planned"}], ids=str
)
@pytest.mark.parametrize("export", [torch.from_dlpack, torch.Tensor.__dlpack__, torch.Tensor.numpy])
def test_memory_that_was_exported_is_not_written(how: dict[str, Any], export: Any) -> None:
    """DLPack exports the tensor itself: its storage has no further owner."""
    step = jit(lambda x: x * 2 + 1, donate_argnums=0, **how)
    for _ in range(3):
        x = torch.full((1 << 12,), 3.0)
        held = export(x)
        step(x)
        others = [torch.full((1 << 12,), 9.0) for _ in range(3)]
        seen = (
            torch.from_dlpack(held) if export is torch.Tensor.__dlpack__ else torch.as_tensor(held)
        )
        assert torch.equal(seen, torch.full((1 << 12,), 3.0)), others
        with pytest.raises(DonatedError):
            x + 1
