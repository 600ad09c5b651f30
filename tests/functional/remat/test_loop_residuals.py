"""Gradients taken outside of a transform: both halves of a program with loops have loops."""

from __future__ import annotations

import functools
import gc
from random import Random
from typing import Any

import pytest
import torch
from _live import LiveBytes
from effort import examples
from random_loops import random_loop
from torch.func import grad

from torchard import Mesh, P, checkpoint, jit, nn, policies, repeat, shard
from torchard.functional import torch_internals as internals
from torchard.functional.engine import lowered_function
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, VAL
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.functional.remat.split import Split, split

COUNT, F64 = 5, torch.float64
generator = torch.Generator().manual_seed(0)
WS = torch.randn(COUNT, 4, 4, generator=generator, dtype=F64) / 2
X = torch.randn(6, 4, generator=generator, dtype=F64)
HOW = ("plain", "save nothing", "save dots", "of the block")


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = nn.layer_norm(x @ w, w[0], w[1])
    return torch.tanh(y) * x.sin() + x


def loss(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return repeat(layer, ws, x).square().sum()


def wrapped(how: str) -> Any:
    return {
        "plain": lambda f: f,
        "save nothing": checkpoint,
        "save dots": functools.partial(checkpoint, policy=policies.save_dots),
        "of the block": functools.partial(checkpoint, where="block/*"),
    }[how]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[Split]:
    """The halves that are made in a test."""
    made: list[Split] = []

    def splitting(program: Program) -> Split:
        made.append(split(program))
        return made[-1]

    monkeypatch.setattr(lowered_function, "split", splitting)
    return made


@pytest.mark.parametrize("how", HOW)
def test_halves_have_loops(how: str, halves: list[Split]) -> None:
    """One in each; what is kept is what the unrolled program keeps, value by value."""
    run = jit(wrapped(how)(loss), backend="eager")
    for have, want in zip(grad(run, (0, 1))(WS, X), grad(loss, (0, 1))(WS, X), strict=True):
        torch.testing.assert_close(have, want)
    (made,) = halves
    loops = [{LOOP.of(n) for n in half.calls if LOOP.on(n)} for half in (made.forward, made.backward)]
    # Where a policy keeps nothing that is handed on, the forward's loop runs again.
    assert len(loops[0]) == 1 and len(loops[1]) in (1, 2) and not loops[0] & loops[1]
    straight = split(unrolled(run.lower_joint(WS, X)))
    kept = [
        sorted(tuple(VAL.of(node).shape) for node in s.backward.placeholders) for s in (made, straight)
    ]
    # The unrolled program keeps rows of stacked arguments as the arguments, too.
    assert kept[0] == kept[1]


@pytest.mark.parametrize("how", HOW)
def test_peak_is_the_predicted_one(how: str) -> None:
    ws, x = (torch.randn(*shape) for shape in ((COUNT, 64, 64), (128, 64)))
    run = jit(wrapped(how)(loss), backend="eager")

    def both() -> Any:
        ws_, x_ = ws.clone().requires_grad_(), x.clone().requires_grad_()
        return torch.autograd.grad(run(ws_, x_), (ws_, x_))

    both()
    gc.collect()
    with LiveBytes([ws, x]) as count:
        both()
    predicted = run.lower_joint(ws, x).peak + sum(t.nbytes for t in (ws, x))  # the clones
    assert predicted * 0.98 <= count.peak() <= predicted * 1.02


@pytest.mark.parametrize("specs", [(P(None, "a"), P("a")), (P(None, None, "a"), P()), (P(), P("a"))])
def test_over_a_mesh(specs: Any, halves: list[Split]) -> None:
    """Residuals are placed as the values are; the collectives are those of a gradient taken inside."""
    mesh = Mesh({"a": 2}, virtual=True)
    run = shard(loss, mesh, in_specs=specs)
    have = grad(run, (0, 1))(WS, X)
    for value, want in zip(have, grad(loss, (0, 1))(WS, X), strict=True):
        torch.testing.assert_close(value.full() if hasattr(value, "full") else value, want)
    (made,) = halves
    assert has_loops(made.forward) and has_loops(made.backward)
    sent = len(made.forward.collectives) + len(made.backward.collectives)
    assert sent == len(run.lower_joint(WS, X).collectives)


@pytest.mark.parametrize("seed", range(examples(ci=20, explore=400)))
def test_random_loops(seed: int) -> None:
    text, fn, args = random_loop(Random(seed), Mesh({"a": 1}, virtual=True))
    if "closes=True" in text and "without" in text:
        pytest.skip("a block that runs again for its derivative may not read what it does not use")
    run = jit(fn, backend="eager")

    def total(f: Any) -> Any:
        def summed(*args: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.sum() for x in f(*args) if x.is_floating_point()]).sum()

        return summed

    wanted = tuple(i for i, arg in enumerate(args) if arg.is_floating_point())
    have, want = (grad(total(f), wanted)(*args) for f in (run, fn))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, msg=lambda message: f"{message}\n{text}")


@pytest.mark.parametrize("outside", [False, True])
def test_compiled_parts_do_not_depend_on_depth(
    outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each body is compiled once, wherever the gradient is taken."""

    def compile_graph(module: Any, *_: Any) -> Any:
        sizes.append(len(module.graph.nodes))
        return lambda values: list(module(*values))

    monkeypatch.setattr(internals, "compile_graph", compile_graph)
    compiled = []
    for depth in (3, 9):
        sizes: list[int] = []
        run = grad(jit(loss)) if outside else jit(grad(loss))
        ws = WS[:1].expand(depth, 4, 4).clone()
        torch.testing.assert_close(run(ws, X), grad(loss)(ws, X))
        compiled.append(sizes)
    assert len(compiled[0]) == len(compiled[1])
    # What hands over the values of each row is outside of the parts.
    assert compiled[0] == compiled[1]
