"""checked and error_if: where an error is, in derivations and stacks of transforms; what they cost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jvp, vmap

import torchard as ta
from torchard import (
    CheckError,
    Mesh,
    P,
    accumulate,
    associative_scan,
    checked,
    checkpoint,
    error_if,
    fuse,
    jit,
    shard,
)

Fn = Callable[..., Any]
MESH = Mesh({"dp": 2}, virtual=True)
X = torch.tensor([[2.0, 3.0], [9.0, 4.0], [5.0, 7.0], [8.0, 6.0]])
BAD = X.clone().index_put_((torch.tensor(2), torch.tensor(1)), torch.tensor(0.5))


def line(x: Any) -> Any:
    with ta.scope("score"):
        return (x - 1).log().sum()


def loop(x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        return (x - 1).log() + 4

    return ta.fori_loop(0, 5, body, x).sum()


def layers(x: Any) -> Any:
    ws = torch.tensor([0.1, 0.2, 2.0, 0.3])
    return ta.repeat(lambda w, x: (x - w).log() + 2, ws, x).sum()


def until(x: Any) -> Any:
    return ta.while_loop(
        lambda x: x.sum() < 43.9, lambda x: (x - 1).log() + 4, x, max_steps=9
    ).sum()


def branch(x: Any) -> Any:
    return ta.cond(x.sum() > 0, lambda x: (x - 1).log(), lambda x: x, x).sum()


def hidden(x: Any) -> Any:
    """NaN that the result does not have."""
    y = (x - 1).log()
    return torch.where(x > 1, y, 0.0).sum()


# Each with the pattern of the place that is in the message.
WRONG: dict[str, tuple[Fn, str]] = {
    "line": (line, "score forward"),
    "loop": (loop, "fori/0 forward"),
    "layers": (layers, "block/2 forward"),
    # Its gradient is that of segments, of which each has some steps.
    "while_loop": (until, "(while/0|.*segment/true/.*while/true) forward"),
    "cond": (branch, "cond/true forward"),
    "hidden": (hidden, "forward"),
}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "checkpoint": checkpoint,
    "fuse": fuse,
    "jit": lambda f: jit(f, backend="eager"),
    "shard": lambda f: shard(f, MESH, in_specs=P("dp")),
}
DERIVATIONS: dict[str, Callable[[Fn], Fn]] = {
    "as it is": lambda f: f,
    "grad": grad,
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap of grad": lambda f: lambda x: vmap(grad(f))(torch.stack([X + 40, x]))[1],
    "hessian": lambda f: lambda x: hessian(f)(x).sum(),
}
WORDS = [(), *((a,) for a in TRANSFORMS), *itertools.permutations(TRANSFORMS, 2)]


def where(run: Callable[[], Any]) -> tuple[str, str]:
    """The line and the place of the error."""
    with pytest.raises(CheckError) as caught:
        run()
    assert str(caught.value).startswith(f"{caught.value.source}: {caught.value.message}")
    return caught.value.source, caught.value.place


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("derivation", DERIVATIONS)
@pytest.mark.parametrize("what", WRONG)
def test_the_first_wrong_operation_is_named(what: str, derivation: str) -> None:
    fn, place = WRONG[what]
    name = fn.__name__ if what in ("line", "hidden") else ""
    for word in WORDS if derivation in ("as it is", "grad") else WORDS[:2]:
        stacked = checked(fn)
        for each in word:
            stacked = TRANSFORMS[each](stacked)
        run = DERIVATIONS[derivation](stacked)
        source, found = where(lambda run=run: run(BAD))
        assert "test_checks.py:" in source and name in source and re.fullmatch(place, found), (
            word,
            source,
            found,
        )
        right = X
        want = DERIVATIONS[derivation](fn)(right)
        have = run(right)
        have = have.full() if hasattr(have, "full") else have
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", [name for name in WRONG if name != "hidden"])
def test_compiled_code_is_looked_at(what: str) -> None:
    fn, place = WRONG[what]
    for run in (jit(checked(fn)), checked(jit(fn)), grad(jit(checked(fn)))):
        source, found = where(lambda run=run: run(BAD))
        assert "test_checks.py:" in source and re.fullmatch(place, found)
        run(X)


def test_a_part_of_a_program_is_checked() -> None:
    for backend in ("eager", "inductor"):

        def outer(x: torch.Tensor, inner: Fn) -> torch.Tensor:
            return (x - 1).log().nansum() + inner(x)

        run = jit(lambda x: outer(x, checked(line)), backend=backend)
        assert where(lambda run=run: run(BAD))[1] == "score forward"
        assert not jit(lambda x: outer(x, line), backend=backend)(X).isnan()
        one = jit(lambda x: outer(x, checked(torch.sin)).sum(), backend=backend)
        one(BAD)  # the first log is not looked at


@pytest.mark.parametrize("around", [checked, lambda f: f], ids=["checked grad", "grad checked"])
def test_gradients_are_looked_at(around: Callable[[Fn], Fn]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (0 * x).sqrt().sum()

    inner = f if around is checked else checked(f)
    source, place = where(lambda: around(grad(inner))(X[0]))
    assert "in f" in source and place == "backward"


def test_which_values_are_wrong_and_whose_they_are() -> None:
    x = torch.tensor([1.0, 0.0, float("nan")])
    with pytest.raises(
        CheckError, match=r"aten.log returned NaN at \[2\], 1 of 3 values, of operands with NaN"
    ):
        checked(torch.log)(x)
    with pytest.raises(CheckError, match=r"infinity at \[1\], 1 of 3 values, of operands with NaN"):
        checked(torch.log, nan=False, inf=True)(x)
    assert torch.equal(checked(torch.log, nan=False)(x).nan_to_num(), torch.log(x).nan_to_num())
    assert checked(lambda x: x.masked_fill(x > 1, -torch.inf).amax())(X).item() == -torch.inf


def test_what_is_not_wrong() -> None:
    """Memory that is not written yet, constants, what is handed through, and what is not checked."""
    garbage = torch.full((1000, 100), float("nan"))
    del garbage
    checked(lambda x: torch.empty(1000, 100).fill_(1.0).sum() + x.sum())(X)

    def by_parts(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(1000, 100)
        y[:500], y[500:] = 1.0, 2.0
        return y.sum() + x.sum()

    checked(by_parts)(X)
    for backend in ("eager", "aot_eager"):
        jit(checked(lambda x, n: (x * 2, n)), backend=backend)(X, X * torch.nan)
        jit(lambda x: (checked(torch.sin)(x), (x - 99).log()), backend=backend)(X)
    pairs = shard(
        lambda x: associative_scan(lambda a, b: b + 0 * (b - a) / (b - a), x), MESH, P("dp")
    )
    checked(pairs)(torch.arange(6.0))  # no element is combined with itself


def recurrence(w: Any, x: Any) -> Any:
    return ta.scan(lambda c, r: ((c * w).sin(), (r * w).log()), x[0], x)[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_equal_regions_of_which_one_is_checked(backend: str) -> None:
    one = torch.tensor(1.0)

    def f(a: Any, b: Any, first: Fn, second: Fn) -> Any:
        return first(recurrence)(one, a), second(recurrence)(one, b)

    def plain(fn: Fn) -> Fn:
        return fn

    with pytest.raises(CheckError, match="log returned NaN"):
        jit(lambda a, b: f(a, b, plain, checked), backend=backend)(X, X - 99)
    jit(lambda a, b: f(a, b, checked, plain), backend=backend)(X, X - 99)
    jit(lambda a, b: f(a, b, checked, partial(checked, nan=False)), backend=backend)(X, X - 99)


def test_sums_over_a_loop_are_looked_at() -> None:
    """Infinities of two iterations, which are NaN together."""

    def f(w: Any, rows: Any) -> Any:
        return ta.scan(lambda c, r: (c + w.sqrt() * r, None), torch.tensor(0.0), rows)[0]

    for run in (checked(grad(f)), grad(checked(f)), jit(checked(grad(f)), backend="eager")):
        with pytest.raises(CheckError, match="returned NaN"):
            run(torch.tensor(0.0), torch.tensor([1.0, -1.0]))


def test_a_checked_function_that_calls_one() -> None:
    for outer in (partial(checked, nan=False), partial(checked, inf=True)):
        with pytest.raises(CheckError, match="log returned NaN"):
            outer(checked(torch.log))(X - 99)
    with pytest.raises(CheckError, match="infinity"):
        checked(checked(torch.log, inf=True))(X * 0)


def test_microbatches_and_ranks_are_named() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * (x - 1).log()).mean()

    with pytest.raises(
        CheckError, match=r"aten.log returned NaN at \[0, 1\].*\(forward, microbatch 1\)"
    ):
        accumulate(checked(grad(loss)), 2, batch=(None, 0))(torch.tensor(1.0), BAD)
    for stack in (
        lambda f: shard(checked(f), MESH, in_specs=P("dp")),
        lambda f: checked(shard(f, MESH, in_specs=P("dp"))),
    ):
        with pytest.raises(CheckError, match=r"at \[0, 1\].*\(score forward, rank dp=1\)"):
            stack(line)(BAD)


INDEXED: dict[str, Fn] = {
    "index": lambda w, i: w[i],
    "index_select": lambda w, i: w.index_select(0, i),
    "embedding": lambda w, i: F.embedding(i, w),
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, 2)),
    "index_add": lambda w, i: w.index_add(0, i, torch.ones(2, 2)),
    "index_put": lambda w, i: w.index_put((i,), torch.ones(2, 2)),
    "scatter": lambda w, i: w.scatter(0, i[:, None].expand(-1, 2), 1.0),
}
WAYS: dict[str, Callable[[Fn], Fn]] = {
    "eager": lambda f: f,
    "inductor": jit,
    "rows split": lambda f: shard(f, MESH, in_specs=(P("dp"), P())),
    "indices split": lambda f: shard(f, MESH, in_specs=(P(), P("dp"))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", INDEXED)
def test_indices_past_the_end(what: str, way: str) -> None:
    fn, w = INDEXED[what], torch.arange(8.0).reshape(4, 2)
    negative = what.startswith("index") and what in ("index", "index_put")
    for run in (checked(WAYS[way](fn)), WAYS[way](checked(fn))):
        for wrong in (4, -5 if negative else -1):
            with pytest.raises(
                CheckError, match=rf"{what} was given index {wrong} at .*, of a dim of 4"
            ):
                run(w, torch.tensor([1, wrong]))
        have = run(w, torch.tensor([1, 3]))
        torch.testing.assert_close(
            have.full() if hasattr(have, "full") else have, fn(w, torch.tensor([1, 3]))
        )
    grads = grad(lambda w, i: F.embedding(i, w).sum())  # which does not need the forward's value
    with pytest.raises(CheckError, match="was given index 4"):
        checked(WAYS[way](grads))(w, torch.tensor([1, 4]))
    checked(WAYS[way](lambda w, i: w.index_fill(0, i, 0.0)))(w, torch.tensor([0, -1]))
    mask, row = torch.ones(4, 2, dtype=torch.bool), torch.zeros(8)
    checked(WAYS[way](lambda w, i: w.index_put((mask,), row)))(w, torch.tensor([0, 0]))


def test_a_check_adds_no_collective() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad(lambda w: (x @ w).square().mean())(w)

    def plan(fn: Fn) -> Any:
        rows = shard(fn, MESH, in_specs=(P(), P("dp"))).lower(torch.ones(2, 2), X).collectives
        return [(row.title, row.bytes) for row in rows]

    assert plan(step) == plan(checked(step)) != []
    # Of a condition, ranks exchange a bool.
    extra = plan(lambda w, x: (error_if(x > 99, "large"), step(w, x))[1])
    assert sorted(extra) == sorted([*plan(step), ("all_reduce[max] over dp, forward", 1)])


def test_messages_are_read_when_they_are_given() -> None:
    for message, said in (
        ("set {1,2} {", "write braces twice"),
        ("x {y}", "shows 'y', which is not"),
    ):
        with pytest.raises(ValueError, match=said):
            error_if(False, message, x=1)
    with pytest.raises(CheckError, match=r"x \{x:.1f\} \(x is tensor"):
        error_if(True, "x {x:.1f}", x=X)


def test_planned_memory_refuses() -> None:
    with pytest.raises(ta.PurityError, match=r"line is checked.*leave out memory='planned'"):
        jit(checked(line), backend="eager", memory="planned")(X)


# -- error_if ---------------------------------------------------------------------------------------


def descend(x: Any) -> Any:
    def step(i: Any, x: Any) -> Any:
        error_if(x > 1e3, "diverged at {i}: {x:.0f}", i=i, x=x.max())
        return x * x

    return ta.fori_loop(0, 6, step, x).sum()


SAID = "in step: diverged at 3: 6561"


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_the_message_has_the_values_and_the_iteration(derivation: str) -> None:
    fn, x = DERIVATIONS[derivation], torch.full((4, 2), 3.0)
    if "vmap" in derivation:  # with an example that is larger by 40
        with pytest.raises(CheckError, match="diverged at 1: 2401, in example 0"):
            fn(descend)(x)
        return
    for word in WORDS[:5]:
        stacked: Fn = descend
        for each in word:
            stacked = TRANSFORMS[each](stacked)
        with pytest.raises(CheckError, match=SAID + (r" \(fori/3 forward\)" if word else "")):
            fn(stacked)(x)
        fn(stacked)(x / 4)
    if derivation == "as it is":
        with pytest.raises(CheckError, match=SAID + r" \(fori/3 forward\)"):
            jit(descend)(x)


def test_only_a_taken_branch_is_asked() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            error_if(True, "taken")
            return x

        return ta.cond(x.sum() > 0, wrong, lambda x: 2 * x, x)

    for way in (lambda f: f, TRANSFORMS["jit"], jit, checkpoint, TRANSFORMS["shard"]):
        way(f)(-X)
        with pytest.raises(CheckError, match="taken"):
            way(f)(X)


def test_a_gradient_raises_in_its_forward() -> None:
    asked: list[float] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        ta.debug.callback(lambda s: asked.append(float(s)), x.sum())
        error_if(x.isnan(), "nan")
        return x.sin().exp().sum()

    for around in (lambda f: grad(checkpoint(f)), lambda f: hessian(jit(f, backend="eager"))):
        asked.clear()
        around(f)(X[0])
        assert len(asked) == 1
        with pytest.raises(CheckError, match="in f: nan"):
            around(f)(X[0] * torch.nan)


def test_an_accumulated_condition_is_that_of_the_batch() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        error_if(x < 1, "small")
        return (w * x).mean()

    run = accumulate(grad(loss), 2, batch=(None, 0))
    torch.testing.assert_close(run(torch.tensor(1.0), X), X.mean())
    with pytest.raises(CheckError, match="in loss: small"):
        run(torch.tensor(1.0), BAD)
