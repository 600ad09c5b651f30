"""associative_scan: equal to the loop in derivations and transforms; what is sent; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import torchard as ta
from torchard import (
    LoopError,
    Mesh,
    P,
    PurityError,
    associative_scan,
    checkpoint,
    fuse,
    jit,
    place,
    shard,
)
from torchard.transforms import Program, Rewrite, Transformed

F64 = torch.float64
Fn = Callable[..., Any]
MESHES = {
    "2": (Mesh({"a": 2}, virtual=True), P("a")),
    "3": (Mesh({"a": 3}, virtual=True), P("a")),
    "4": (Mesh({"a": 4}, virtual=True), P("a")),
    "the outer of 2 x 2": (Mesh({"a": 2, "b": 2}, virtual=True), P("a")),
    "the inner of 2 x 2": (Mesh({"a": 2, "b": 2}, virtual=True), P("b")),
    "2 x 2": (Mesh({"a": 2, "b": 2}, virtual=True), P(("a", "b"))),
    "the features": (Mesh({"a": 2}, virtual=True), P(None, "a")),
}


def affine(f: Any, g: Any) -> Any:
    return f[0] * g[0], f[1] * g[0] + g[1]


def product(a: Any, b: Any) -> Any:
    return (a[0].unflatten(-1, (2, 2)) @ b[0].unflatten(-1, (2, 2))).flatten(-2), torch.maximum(
        a[1], b[1]
    )


def steep(a: Any, b: Any) -> Any:
    """Without a finite derivative at (0, 0), which no pair of its arguments below is."""
    return (a[0].square() + b[0].square()).sqrt(), torch.minimum(a[1], b[1])


OPERATIONS: dict[str, Fn] = {
    "affine": affine,
    "product": product,
    "steep": steep,
    "later": lambda a, b: (torch.logaddexp(a[0], b[0]), b[1] + 0 * a[1]),
}


def arguments(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(n, 4, generator=generator, dtype=F64) + 0.25
    return a, torch.randn(n, 4, generator=generator, dtype=F64)


def looped(f: Fn, xs: Any, reverse: bool = False) -> Any:
    n = xs[0].shape[0]
    found: list[Any] = [None] * n
    carry: Any = None
    for i in range(n)[::-1] if reverse else range(n):
        x = tuple(each[i : i + 1] for each in xs)
        carry = x if carry is None else f(carry, x)
        found[i] = carry
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def loss(fn: Fn) -> Fn:
    return lambda *xs: sum((y.sin() * (i + 1)).sum() for i, y in enumerate(fn(*xs)))


WAYS: dict[str, Callable[[Fn], Fn]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(loss(f), (0, 1)),
    "jvp": lambda f: lambda a, b: jvp(f, (a, b), (b, a)),
    "grad of grad": lambda f: grad(lambda a, b: grad(loss(f))(a, b).square().sum(), (0, 1)),
    "hessian-vector product": lambda f: (
        lambda a, b: jvp(lambda a: grad(loss(f))(a, b), (a,), (b,))[1]
    ),
    "vmap": lambda f: lambda a, b: vmap(f, (0, None))(torch.stack([a, a / 2]), b),
    "vmap of grad": lambda f: (
        lambda a, b: vmap(grad(loss(f)), (0, None))(torch.stack([a, a / 2]), b)
    ),
}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "scan": lambda f: (
        lambda *xs: ta.tree.map(
            lambda y: y[0],
            ta.scan(lambda c, x: (c, f(*x)), None, tuple(x.unsqueeze(0) for x in xs))[1],
        )
    ),
}


def whole(values: Any) -> list[torch.Tensor]:
    return [getattr(x, "full", lambda x=x: x)() for x in ta.tree.leaves(values)]


def same(have: Any, want: Any) -> None:
    for a, b in zip(whole(have), whole(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# A mesh plans for seconds, so that most are only met by the ways in which something is new on them.
ON_MESHES = {"as it is": list(MESHES), "grad": ["3", "2 x 2"]}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("n", [8, 11])
def test_equals_the_loop(way: str, reverse: bool, n: int) -> None:
    xs = arguments(n)
    for f in OPERATIONS.values():

        def ours(*xs: Any, f: Fn = f) -> Any:
            return associative_scan(f, xs, 0, reverse)

        want = WAYS[way](lambda *xs, f=f: looped(f, xs, reverse))(*xs)
        same(WAYS[way](ours)(*xs), want)
        for transform in TRANSFORMS.values() if f is steep else ():
            same(transform(WAYS[way](ours))(*xs), want)
            same(WAYS[way](transform(ours))(*xs), want)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("n", [6, 7])
def test_equals_the_loop_on_a_mesh(way: str, reverse: bool, n: int) -> None:
    xs = arguments(n)

    def ours(*xs: Any) -> Any:
        return associative_scan(steep, xs, 0, reverse)

    want = WAYS[way](lambda *xs: looped(steep, xs, reverse))(*xs)
    for name in ON_MESHES.get(way, ["2"]):
        mesh, spec = MESHES[name]
        same(shard(WAYS[way](ours), mesh, in_specs=(spec, spec))(*xs), want)
        same(WAYS[way](shard(ours, mesh, in_specs=(spec, spec)))(*xs), want)


@settings(max_examples=40)
@given(st.integers(1, 99), st.sampled_from(sorted(OPERATIONS)), st.booleans(), st.integers(1, 6))
def test_any_length(n: int, operation: str, reverse: bool, count: int) -> None:
    """In blocks, too, as a program has them that is split over as many ranks."""

    class Splitting(Rewrite):
        sizes = (count,)

        def __call__(self, program: Program) -> Program:
            return program

    xs, f = arguments(n, n), OPERATIONS[operation]

    def ours(*xs: Any) -> Any:
        return associative_scan(f, xs, 0, reverse)

    same(ours(*xs), looped(f, xs, reverse))
    same(Transformed(ours, [Splitting()])(*xs), looped(f, xs, reverse))


@settings(max_examples=8)
@given(
    st.integers(1, 9),
    st.sampled_from(sorted(OPERATIONS)),
    st.booleans(),
    st.sampled_from(sorted(MESHES)),
)
def test_any_length_on_a_mesh(n: int, operation: str, reverse: bool, on: str) -> None:
    xs, (mesh, spec), f = arguments(n, n), MESHES[on], OPERATIONS[operation]

    def ours(*xs: Any) -> Any:
        return associative_scan(f, xs, 0, reverse)

    run = grad(loss(ours), (0, 1))
    placed = [place(x, mesh, spec) for x in xs]
    same(shard(ours, mesh)(*placed), looped(f, xs, reverse))
    same(shard(run, mesh)(*placed), run(*xs))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_other_dims_and_dtypes(dim: int) -> None:
    x = torch.randint(0, 9, (3, 6), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.int64, torch.int8, torch.bfloat16, torch.float16):
        have = associative_scan(torch.maximum, x.to(dtype), dim)
        assert torch.equal(have, x.to(dtype).cummax(dim)[0])
    assert torch.equal(associative_scan(torch.logical_or, x > 6, dim), (x > 6).cummax(dim)[0])
    assert torch.equal(associative_scan(torch.add, x[:0], 0), x[:0])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("on", MESHES)
def test_ranks_gather_one_value_of_each(on: str, reverse: bool) -> None:
    mesh, spec = MESHES[on]
    n, width, size = 24, 4, 8
    names = spec.axes
    ranks = [dict(mesh.sizes)[name] for name in names]
    a, b = (place(x, mesh, spec) for x in arguments(n))

    def ours(a: Any, b: Any) -> Any:
        return associative_scan(affine, (a, b), 0, reverse)[1]

    def rows(fn: Fn) -> list[tuple[str, int]]:
        return [(row.kind, row.bytes) for row in shard(fn, mesh).lower(a, b).collectives]

    # One gather for each axis, from the inner one on, of a and b of one element of each rank.
    summaries = [("all_gather", 2 * width * size * (count - 1)) for count in ranks[::-1]]
    forward = [] if on == "the features" else summaries
    assert rows(ours) == forward
    # The cotangents of what comes before a rank's elements; that of a needs none of their scan.
    gradient = rows(grad(lambda a, b: ours(a, b).square().sum(), (0, 1)))
    back = [("all_gather", width * size * (count - 1)) for count in ranks[::-1]]
    assert gradient == ([] if on == "the features" else [*forward, *back])


def test_steps_grow_with_the_logarithm() -> None:
    calls = []

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(len(a))
        return a + b

    assert torch.equal(associative_scan(counted, torch.ones(1000)), torch.arange(1.0, 1001))
    assert len(calls) <= 2 * 10 and sum(calls) <= 2 * 1000


def test_a_function_that_writes_is_refused() -> None:
    for way in (lambda f: f, TRANSFORMS["jit"]):
        with pytest.raises(PurityError, match="f writes to its arguments"):
            way(lambda x: associative_scan(lambda a, b: a.add_(b), x * 1))(torch.ones(4))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: associative_scan(torch.add, [torch.ones(2), torch.ones(3)]),
            r"xs\[0\] has 2, xs\[1\] has 3",
        ),
        (
            lambda: associative_scan(torch.add, torch.ones(2), 1),
            "xs has 1 dims, so there is no dim 1",
        ),
        (lambda: associative_scan(torch.add, {"a": 3}), r"xs\['a'\] is int; xs must be tensors"),
        (lambda: associative_scan(torch.add, []), "xs has no tensors"),
        (lambda: associative_scan(lambda a, b: (a, b), torch.ones(2)), r"f returned PyTreeSpec"),
        (
            lambda: associative_scan(lambda a, b: (a + b).sum(0), torch.ones(4)),
            r"test_associative_scan.py.*f returned float32\[\] for xs, of which it was given float",
        ),
        (lambda: associative_scan(lambda a, b: a > b, torch.ones(4)), r"f returned bool\[2\]"),
        (
            lambda: associative_scan(torch.add, place(torch.ones(4), MESHES["2"][0], P("a"))),
            "MeshTensor; xs must be tensors",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(LoopError, match=said):
        call()


def test_only_an_associative_function_passes() -> None:
    a, b, c = (arguments(4, seed) for seed in range(3))
    for f in OPERATIONS.values():
        assert ta.testing.check_associative(f, a, b, c).good
    with pytest.raises(AssertionError, match="not associative"):
        ta.testing.check_associative(lambda a, b: (a[0] - b[0], b[1]), a, b, c)
    with pytest.raises(AssertionError, match="not element by element along dim 0"):
        ta.testing.check_associative(lambda a, b: (a[0] + b[0], a[1] + b[1].mean(0)), a, b, c)
