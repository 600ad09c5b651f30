"""Effects: performed once for each evaluation of the plain function, in its order, under every stack."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from effort import examples
from torch.func import grad, grad_and_value, hessian, jvp, vmap

import torchard as ta
from torchard import (
    DerivativeError,
    Mesh,
    P,
    PurityError,
    ShapeDtype,
    accumulate,
    checkpoint,
    cond,
    custom_vjp,
    debug,
    fori_loop,
    fuse,
    io_callback,
    jit,
    place,
    pure_callback,
    scan,
    shard,
    shard_map,
    switch,
    while_loop,
)

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=generator, dtype=F64)
X = torch.randn(4, 3, generator=generator, dtype=F64)

Fn = Callable[..., Any]
seen: list[Any] = []


def see(what: str, *values: Any) -> None:
    """An effect that remembers what it was given."""
    debug.callback(lambda *values: seen.append((what, *map(_rounded, values))), *values)


def _rounded(value: Any) -> Any:
    return round(float(value), 6) if isinstance(value, torch.Tensor) else value


def transcript(fn: Fn, *args: Any) -> list[Any]:
    """What a call sees, at the first call and at the second."""
    seen.clear()
    fn(*args)
    once = list(seen)
    seen.clear()
    fn(*args)
    assert seen == once
    return once


def program(w: Any, x: Any) -> Any:
    """Effects of values and of none, in nested loops and branches, of what gradients pass and do not."""
    see("begin")
    h = torch.tanh(x @ w)
    see("h", h.sum(), "a string", h.max())

    def step(i: Any, c: Any) -> Any:
        see("step", i, c.sum())

        def taken(c: Any) -> Any:
            see("taken", c.norm())
            return fori_loop(0, 2, inner, c * 0.5)

        return cond(c.sum() > 0.2, taken, lambda c: (see("not taken"), c + 1)[1], c)

    def inner(i: Any, c: Any) -> Any:
        see("inner", i)
        return c.sin()

    y = fori_loop(0, 3, step, h.mean(0))
    see("between")

    def going(carry: Any) -> Any:
        see("going", carry[1])
        return carry[0].square().sum() < 40

    def body(carry: Any) -> Any:
        see("body")
        return carry[0] * 2 + 0.1, carry[1] + 1

    z, n = while_loop(going, body, (y.detach(), 0))
    y, _ = while_loop(going, body, (y, 0), 5)
    _, ys = scan(lambda c, row: (see("row", row.sum()), (None, row * 2))[1], None, h)
    see("end", n)
    return (y * y).sum() + z.detach().sum() * y.sum() + ys.square().sum()


def on_mesh(fn: Fn) -> Fn:
    return shard(fn, Mesh({"a": 2}, virtual=True), in_specs=(P(), P("a")))


TRANSFORMS: dict[str, Fn] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": on_mesh,
}
WAYS: dict[str, Fn] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(f),
    "grad_and_value": lambda f: grad_and_value(f, (0, 1)),
    "grad of grad": lambda f: grad(lambda w, x: grad(f)(w, x).square().sum()),
    "jvp": lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (w,)),
    "jvp of grad": lambda f: lambda w, x: jvp(lambda w: grad(f)(w, x), (w,), (w,)),
    "autograd": lambda f: (
        lambda w, x: torch.autograd.grad(f(w := w.clone().requires_grad_(), x), w)
    ),
}
# Words of up to three transforms, how many of them are inside of the derivative, and which derivative.
STACKS = [
    (word, place, way)
    for length in (1, 2, 3)
    for word in itertools.product(TRANSFORMS, repeat=length)
    for place in range(length + 1)
    for way in WAYS
    if way != "autograd" or place == length  # outside of transforms: of plain tensors
]
DRAWN = Random(1).sample(STACKS, examples(ci=14, explore=600))


@pytest.mark.parametrize(("word", "place", "way"), DRAWN)
def test_a_transcript_is_that_of_the_plain_function(word: Any, place: int, way: str) -> None:
    fn = program
    for name in word[:place]:
        fn = TRANSFORMS[name](fn)
    fn = WAYS[way](fn)
    for name in word[place:]:
        fn = TRANSFORMS[name](fn)
    want = transcript(program, W, X)
    assert len(want) > 20
    assert transcript(fn, W, X) == want


def test_under_a_compiler() -> None:
    want = transcript(program, W, X)
    assert transcript(jit(program), W, X) == want
    assert transcript(jit(grad(program)), W, X) == want


def test_all_evaluations_of_a_hessian() -> None:
    """The forward runs once, whatever the number of directions."""

    def f(x: Any) -> Any:
        see("x", x.sum())
        return x.sin().sum()

    for run in (f, jit(f, backend="eager"), checkpoint(f)):
        assert transcript(hessian(run), X[0]) == transcript(f, X[0])


def test_of_the_examples_of_a_vmap_each_performs_it() -> None:
    def f(x: Any, w: Any) -> Any:
        see("x", x)
        see("w", w)
        return x * w

    want = [("x", 1.0), ("x", 2.0), ("w", 3.0)]
    ones, three = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    for run in (
        vmap(f, (0, None)),
        jit(vmap(f, (0, None)), backend="eager"),
        vmap(jit(f, backend="eager"), (0, None)),
        vmap(grad(checkpoint(f)), (0, None)),
    ):
        assert transcript(run, ones, three) == want
    nested = vmap(vmap(lambda x: see("x", x) or x))
    assert transcript(nested, torch.ones(2, 2)) == [("x", 1.0)] * 4


def test_nothing_is_lost_where_no_result_is_used() -> None:
    def f(x: Any) -> Any:
        cond(x.norm() > 0, lambda: (see("a"), x)[1], lambda: (see("b"), x)[1])
        fori_loop(0, 2, lambda i, c: (see("i", i), c)[1], x)
        switch(torch.tensor(1), [lambda: x, lambda: (see("second"), x)[1]])
        jit(lambda x: (see("inside"), x)[1], backend="eager")(x)
        return x.cos()

    for run in (jit(f, backend="eager"), checkpoint(f), jit(lambda x: f(x).sum() + f(x).sum())):
        again = 2 if run(X).ndim == 0 else 1
        assert (
            transcript(run, X) == [("a",), ("i", 0.0), ("i", 1.0), ("second",), ("inside",)] * again
        )


def test_cotangents_are_printed_in_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        debug.print("x {:.0f}", x)
        x = debug.print_cotangent("cotangent {:.0f}", x * 2)
        return (x * 3).sum()

    x = torch.tensor(1.0)
    for run in (
        grad(f),
        jit(grad(f), backend="eager"),
        grad(jit(f, backend="eager")),
        grad(checkpoint(f)),
        grad(shard(f, Mesh({"a": 2}, virtual=True))),
    ):
        assert ta.full(run(x)) == 6
        assert capsys.readouterr().out == "x 1\ncotangent 3\n"
    f(x)
    assert capsys.readouterr().out == "x 1\n"


def test_what_a_gradient_sees_is_seen_after_the_forward() -> None:
    rule = custom_vjp(lambda x: x.sin())
    rule.defvjp(lambda x: (x.sin(), x), lambda x, ct: ((see("backward", ct), ct * x.cos())[1],))

    def f(x: Any) -> Any:
        y = rule(x).sum()
        see("forward", y)
        return y

    want = [("forward", round(float(X[0, 0].sin()), 6)), ("backward", 1.0)]
    x = X[0, 0]
    for run in (grad(f), jit(grad(f), backend="eager"), grad(jit(f, backend="eager"))):
        assert transcript(run, x) == want


def test_prints_format_trees_and_strings(capsys: pytest.CaptureFixture[str]) -> None:
    @jit
    def f(x: Any) -> Any:
        debug.print("{name}: {x[a]:.2f} at {}", x.shape, name="loss", x={"a": x.sum()})
        return x

    f(torch.ones(3))
    assert capsys.readouterr().out == "loss: 3.00 at torch.Size([3])\n"


def test_on_a_mesh_whole_values_and_in_a_shard_map_those_of_each_rank() -> None:
    mesh = Mesh({"a": 2}, virtual=True)

    def f(x: Any) -> Any:
        see("sum", x.sum())
        return x

    x = torch.arange(4.0)
    assert transcript(shard(f, mesh), place(x, mesh, P("a"))) == [("sum", 6.0)]
    run = shard_map(f, mesh, P("a"), P("a"))
    assert sorted(transcript(run, place(x, mesh, P("a")))) == [("sum", 1.0), ("sum", 5.0)]


def test_sums_of_microbatches_are_seen_once() -> None:
    def loss(x: Any, w: Any) -> Any:
        y = (x @ w).square().mean()
        see("loss", y)
        return y

    for run in (accumulate(loss, 2, batch=(0, None)), accumulate(grad(loss, 1), 2, batch=(0, None))):
        assert transcript(run, X, W) == transcript(loss, X, W)


def test_variables_around_a_function_are_those_of_its_call() -> None:
    """A loop's variable when it was traced; one that the function assigns to when it runs."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    @jit
    def f(x: Any) -> Any:
        for i in range(3):
            debug.callback(lambda: seen.append(i))  # noqa: B023  as in the plain function
            debug.callback(counted)
        return x

    assert transcript(f, X) == [0, 1, 2]
    assert count == 6


def test_an_error_of_a_function_is_raised_as_it_is() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    @jit
    def f(x: Any) -> Any:
        debug.callback(fails, x)
        return x

    with pytest.raises(KeyError, match="mine"):
        f(X)


# -- functions with results ----------------------------------------------------------------------------


def test_io_callbacks_are_called_once_and_in_order() -> None:
    numbers = iter(range(100))

    def f(x: Any) -> Any:
        n = io_callback(lambda: next(numbers), ShapeDtype((), torch.int64))
        m = io_callback(lambda n: n + next(numbers), ShapeDtype((), torch.int64), n)
        return x * n + m

    assert [float(v) for v in jit(f, backend="eager")(torch.zeros(2))] == [1, 1]
    assert float(grad(lambda x: checkpoint(f)(x).sum())(torch.zeros(1))) == 2
    assert next(numbers) == 4
    run = jit(lambda x: fori_loop(0, 2, lambda i, x: x + f(x), x), backend="eager")
    assert float(run(torch.zeros(()))) == (5 + 6) + (7 * 11 + 7 + 8)


def test_what_io_callbacks_cannot_do_is_refused() -> None:
    def f(x: Any) -> Any:
        return x * io_callback(lambda x: x, ShapeDtype((), F64), x.sum())

    with pytest.raises(
        DerivativeError, match=r"test_effects.py:\d+ in f: io_callback.*no derivative"
    ):
        grad(lambda x: f(x).sum())(X)
    with pytest.raises(DerivativeError, match="a derivative, for which the function runs again"):
        jvp(grad(jit(lambda x: f(x.detach()).sum() * x.sum(), backend="eager")), (X,), (X,))
    with pytest.raises(
        ValueError, match=r"io_callback: the function returned float64\[\], and int64"
    ):
        io_callback(lambda: torch.ones((), dtype=F64), ShapeDtype((), torch.int64))


@pytest.mark.parametrize("vectorized", [False, True])
def test_pure_callbacks(vectorized: bool) -> None:
    called: list[Any] = []

    def roll(x: Any) -> Any:
        called.append(tuple(x.shape))
        return x.roll(1, -1)

    def f(x: Any) -> Any:
        return pure_callback(roll, ShapeDtype((3,), F64), x, vectorized=vectorized) * x

    want = X.roll(1, -1) * X
    for run in (vmap(f), jit(vmap(f), backend="eager"), vmap(checkpoint(f))):
        called.clear()
        torch.testing.assert_close(run(X), want)
        assert called == ([(4, 3)] if vectorized else [(3,)] * 4)
    on_two = shard(vmap(f), Mesh({"a": 2}, virtual=True), in_specs=P("a"))
    torch.testing.assert_close(ta.full(on_two(X)), want)


def test_pure_callbacks_have_the_derivative_that_is_stated() -> None:
    sine = custom_vjp(lambda x: pure_callback(lambda x: x.sin(), ShapeDtype((3,), F64), x))
    sine.defvjp(lambda x: (sine.fn(x), x), lambda x, ct: (ct * x.cos(),))
    for run in (sine, jit(sine), checkpoint(sine)):
        torch.testing.assert_close(grad(lambda x, run=run: run(x).sum())(X[0]), X[0].cos())
    with pytest.raises(DerivativeError, match=r"in <lambda>: pure_callback.*state one"):
        grad(lambda x: pure_callback(lambda x: x, ShapeDtype((3,), F64), x).sum())(X[0])


def test_planned_memory_refuses_effects_in_branches() -> None:
    def f(x: Any) -> Any:
        see("x")
        return cond(x.sum() > 0, lambda: (see("a"), x.sin())[1], lambda: x.cos())

    with pytest.raises(
        PurityError, match=r"test_effects.py:\d+ in .*debug.callback is called in a branch"
    ):
        jit(f, backend="eager", memory="planned")(X)
    run = jit(lambda x: (see("x"), x.sin())[1], backend="eager", memory="planned")
    assert transcript(run, X) == [("x",)]
