"""cond and switch: equal to Python's branches in every derivation, and only what is taken runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import torchard as ta
from torchard import (
    BranchError,
    Mesh,
    P,
    PurityError,
    UnexpectedTracerError,
    checkpoint,
    cond,
    fuse,
    jit,
    shard,
    switch,
)

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=generator, dtype=F64)
UP = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
DOWN = torch.tensor([-1.0, -2.0, 0.5], dtype=F64)


def up(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w), x.sum()


def down(x: Any, w: Any) -> Any:
    return x.sin() * w.sum(), x.prod()


def ours(x: Any, w: Any) -> Any:
    """Operands are passed, or closed over."""
    return cond(x.sum() > 0, lambda x: up(x, w), lambda x: down(x, w), x)


def plain(x: Any, w: Any) -> Any:
    return up(x, w) if x.sum() > 0 else down(x, w)


def both(x: Any, w: Any) -> Any:
    """What it is for the examples of a vmap."""
    one, other, pred = up(x, w), down(x, w), x.sum() > 0
    return tuple(torch.where(pred, a, b) for a, b in zip(one, other, strict=True))


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: (fn(x, w)[0] * torch.arange(3.0, dtype=F64)).sum() * fn(x, w)[1]


def on_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    sharded = shard(fn, Mesh({"a": 2}, virtual=True), in_specs=(P(), P(None, "a")))
    return lambda *args: ta.tree.map(ta.full, sharded(*args))


def same(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(loss(f), (0, 1)),
    "hessian": lambda f: hessian(loss(f)),
    "jvp": lambda f: lambda x, w: jvp(lambda x: f(x, w), (x,), (x,)),
    "jvp of grad": lambda f: lambda x, w: jvp(lambda x: grad(loss(f))(x, w), (x,), (x,)),
}
OF_EXAMPLES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": lambda f: lambda x, w: vmap(f, (0, None))(torch.stack([x, -x, 2 * x]), w),
    "vmap of grad": lambda f: lambda x, w: vmap(grad(loss(f)), (0, None))(torch.stack([x, -x]), w),
}
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "planned": lambda f: jit(f, backend="eager", memory="planned"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": on_mesh,
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("way", [*WAYS, *OF_EXAMPLES])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_equals_the_branch_that_is_taken(way: str, transform: str) -> None:
    derive = {**WAYS, **OF_EXAMPLES}[way]
    made = TRANSFORMS[transform]
    for x in (UP, DOWN):
        want = derive(plain if way in WAYS else both)(x, W)
        same(derive(ours)(x, W), want)
        same(made(derive(ours))(x, W), want)
        if transform != "shard":  # whose results here are made whole outside
            same(derive(made(ours))(x, W), want)


@pytest.mark.parametrize("way", ["as it is", "grad", "vmap"])
def test_a_compiler_gets_each_branch(way: str) -> None:
    derive = {**WAYS, **OF_EXAMPLES}[way]
    for x in (UP, DOWN):
        same(jit(derive(ours))(x, W), derive(plain if way in WAYS else both)(x, W))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ran(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Which of the branches' operations run."""
    fn(*args)
    with Operations() as operations:
        fn(*args)
    return {"tanh", "sin", "cos", "mm"} & set(operations.names)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_not_taken_does_not_run(transform: str) -> None:
    made = TRANSFORMS[transform]
    value = made(lambda x, w: ours(x, w)[0])
    assert ran(value, UP, W) == {"mm", "tanh"} and ran(value, DOWN, W) == {"sin"}
    gradient = made(grad(lambda x, w: ours(x, w)[0].square().sum()))
    assert ran(gradient, UP, W) == {"mm", "tanh"} and ran(gradient, DOWN, W) == {"sin", "cos"}


def test_nothing_of_the_other_branch_is_in_a_gradient() -> None:
    """Not even 0 times infinity, as in a gradient of torch.where."""

    def root(x: torch.Tensor) -> torch.Tensor:
        return cond(x > 0, lambda x: x.sqrt(), lambda x: x * 0, x)

    zero = torch.zeros((), dtype=F64)
    assert grad(lambda x: torch.where(x > 0, x.sqrt(), x * 0))(zero).isnan()
    for fn in (root, jit(root, backend="eager")):
        assert grad(fn)(zero) == 0
    assert jit(grad(root), backend="eager")(zero) == 0


def test_a_branch_that_returns_its_operand_returns_a_copy() -> None:
    fn = jit(lambda x: cond(x.sum() > 0, lambda: x, lambda: -x), backend="eager")
    x = UP.clone()
    fn(x).zero_()
    same(x, UP)


def test_a_sum_is_pending_until_it_is_chosen() -> None:
    """Both branches end in a sum over a split dim: one all_reduce, and that of the predicate."""
    mesh = Mesh({"a": 2}, virtual=True)

    def fn(x: Any, v: Any) -> Any:
        return cond(x.mean() > 0, lambda: x @ v, lambda: x.square().sum(1))

    fn_on_mesh = shard(fn, mesh, in_specs=(P(None, "a"), P("a")), out_specs=P())
    x, v = torch.randn(4, 6, generator=generator, dtype=F64), torch.ones(6, dtype=F64)
    lowered = fn_on_mesh.lower(x, v)
    assert [str(c) for c in lowered.collectives] == [
        "all_reduce(a) [] float64",
        "all_reduce(a) [4] float64",
    ]
    for each in (x, -x):
        same(ta.full(fn_on_mesh(each, v)), fn(each, v))


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 9])
def test_switch_takes_the_nearest_branch(index: int) -> None:
    ways = [torch.sin, torch.cos, lambda x: x * 2]
    want = ways[min(max(index, 0), 2)](UP)
    for given in (index, torch.tensor(index), torch.tensor(index, dtype=torch.int32)):
        same(switch(given, ways, UP), want)
        same(jit(lambda i, x: switch(i, ways, x), backend="eager")(given, UP), want)


def test_conditionals_in_conditionals_and_in_loops() -> None:
    def inner(x: Any) -> Any:
        return cond(
            x.sum() > 1,
            lambda: x * 2,
            lambda: switch((x.sum() > 0).long(), [torch.sin, torch.cos], x),
        )

    def ours(x: Any) -> Any:
        return ta.scan(lambda c, y: (inner(c) / 2 + y, c.sum()), x, torch.stack([x, -x, x]))

    def loss(x: Any) -> Any:
        last, sums = ours(x)
        return last.square().sum() + sums.sum()

    for x in (UP, DOWN, UP / 9):
        want = loss(x), grad(loss)(x), hessian(loss)(x)
        for way in (TRANSFORMS["jit"], checkpoint):
            same((way(loss)(x), way(grad(loss))(x), way(hessian(loss))(x)), want)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: cond(x > 0, torch.sin, torch.cos, x), r"pred is bool\[3\].*bool without dims"),
        (lambda x: cond(x.sum(), torch.sin, torch.cos, x), r"pred is float64\[\]"),
        (
            lambda x: cond(x.sum() > 0, lambda: x, lambda: x[:2]),
            r"true its result is float64\[3\].*\[2\]",
        ),
        (
            lambda x: cond(x.sum() > 0, lambda: x, lambda: x.float()),
            r"of branch false float32\[3\]",
        ),
        (lambda x: cond(x.sum() > 0, lambda: (x, x), lambda: x), "must return one structure"),
        (
            lambda x: cond(x.sum() > 0, lambda: (x, 1), lambda: (x, "a")),
            r"branch true its result\[1\]",
        ),
        (lambda x: switch(x.sum(), [torch.sin], x), r"index is float64\[\]"),
        (lambda x: switch(0, [], x), "there are no branches"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(BranchError, match=said):
        jit(call, backend="eager")(UP)


def test_writes_in_a_branch_stay_in_it_or_are_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[0] = 5
        return y.mul_(2)

    def kept(x: torch.Tensor) -> torch.Tensor:
        return cond(x.sum() > 0, lambda: inside(x), lambda: x * 1)

    for x in (UP, DOWN):
        same(jit(kept, backend="eager")(x), kept(x))

    def closed_over(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        cond(x.sum() > 0, lambda: y.add_(1), lambda: y * 1)
        return y

    def passed(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        return cond(x.sum() > 0, lambda y: y.add_(1), lambda y: y * 1, y) + y

    for fn in (closed_over, passed):
        with pytest.raises(PurityError, match=r"test_cond.py:\d+ .* in place"):
            jit(fn, backend="eager")(UP)


def test_what_is_kept_of_a_branch_raises() -> None:
    kept: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        def keep() -> torch.Tensor:
            kept.append(x.sin())
            return x * 1

        return cond(x.sum() > 0, keep, lambda: x * 1) + kept[-1]

    with pytest.raises(UnexpectedTracerError, match=r"test_cond.py:\d+ in keep"):
        jit(fn, backend="eager")(UP)
