"""scan, fori_loop and map: equal to the Python loops they stand for, in every derivation; refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import torchard as ta
from torchard import LoopError, checkpoint, fori_loop, fuse, jit, map, scan
from torchard.functional.programs.unrolled import has_loops

F64 = torch.float64
COUNT = 7
generator = torch.Generator().manual_seed(0)
XS: dict[str, Any] = {
    "a": torch.randn(COUNT, 3, generator=generator, dtype=F64),
    "b": torch.randn(COUNT, 3, 2, generator=generator, dtype=F64),
    "none": None,
}
H = torch.randn(3, generator=generator, dtype=F64)


def body(carry: Any, x: Any) -> Any:
    """A recurrence with an integer carry, and a y of another dtype."""
    h, n = carry
    h = torch.tanh(h * x["a"] + x["b"].sum(-1))
    return (h, n + 1), {"h": h.square(), "n": n, "half": h.float(), "none": x["none"]}


def scanned(reverse: bool, unroll: int | bool) -> Callable[[Any, Any], Any]:
    return lambda h, xs: scan(body, (h, 0), xs, None, reverse, unroll)


def looped(reverse: bool) -> Callable[[Any, Any], Any]:
    def run(h: Any, xs: Any) -> Any:
        ys, carry = [], (h, torch.tensor(0))
        for i in range(COUNT)[::-1] if reverse else range(COUNT):
            carry, y = body(carry, {"a": xs["a"][i], "b": xs["b"][i], "none": None})
            ys.append(y)
        ys = ys[::-1] if reverse else ys
        stacked = {name: torch.stack([y[name] for y in ys]) for name in ("h", "n", "half")}
        return carry, {**stacked, "none": None}

    return run


def loss(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def total(h: Any, xs: Any) -> Any:
        (last, count), ys = fn(h, xs)
        return (
            (ys["h"] * ys["n"].unsqueeze(-1)).sum() + last.sum() * count + ys["half"].double().sum()
        )

    return total


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(loss(f), (0, 1)),
    "hessian": lambda f: hessian(loss(f)),
    "jvp": lambda f: lambda h, xs: jvp(lambda h: f(h, xs)[1]["h"], (h,), (h,)),
    "jvp of grad": lambda f: lambda h, xs: jvp(lambda h: grad(loss(f))(h, xs), (h,), (h,)),
    "jacrev": lambda f: jacrev(lambda h, xs: f(h, xs)[1]["h"]),
    "vmap": lambda f: lambda h, xs: vmap(loss(f), (0, None))(torch.stack([h, -h]), xs),
    "vmap of grad": lambda f: (
        lambda h, xs: vmap(grad(loss(f)), (0, None))(torch.stack([h, -h]), xs)
    ),
}
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
}


def same(have: Any, want: Any) -> None:
    have, want = ta.tree.flatten(have), ta.tree.flatten(want)
    assert have[1] == want[1]
    for a, b in zip(have[0], want[0], strict=True):
        if a is not None or b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("unroll", [1, 3, True])
def test_equals_the_loop(way: str, reverse: bool, unroll: int | bool) -> None:
    def without_none(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda h, xs: f(h, {**xs, "none": None})

    plain, ours = without_none(looped(reverse)), without_none(scanned(reverse, unroll))
    xs = {"a": XS["a"], "b": XS["b"]}
    want = WAYS[way](plain)(H, xs)
    same(WAYS[way](ours)(H, xs), want)
    for transform in TRANSFORMS.values() if unroll == 1 else [TRANSFORMS["jit"]]:
        same(transform(WAYS[way](ours))(H, xs), want)
        same(WAYS[way](transform(ours))(H, xs), want)


@pytest.mark.parametrize("unroll", [1, 2])
def test_is_one_operation(unroll: int) -> None:
    calls = []

    def counted(carry: Any, x: Any) -> Any:
        calls.append(None)
        return body(carry, x)

    program = jit(
        lambda h, xs: scan(counted, (h, torch.tensor(0)), xs, unroll=unroll), backend="eager"
    )
    assert has_loops(program.lower(H, XS))
    # With an iteration that remains of seven.
    assert len(calls) == {1: 1, 2: 3}[unroll]


@pytest.mark.parametrize("way", [lambda f: f, TRANSFORMS["jit"]], ids=["plain", "jit"])
def test_what_is_given_besides_tensors(way: Callable[..., Any]) -> None:
    x = torch.tensor([1.0, 2.0])
    same(
        way(lambda x: scan(lambda c, x: (c + x, c * x), 0, x))(x),
        (torch.tensor(3.0), torch.tensor([0.0, 2])),
    )
    same(
        way(lambda s: scan(lambda c, _: (c * 2, 1), s, length=2))(1.5),
        (torch.tensor(6.0), torch.ones(2).long()),
    )
    none = torch.ones(0, 4)
    same(
        way(lambda x: scan(lambda c, x: (c + x.sum(), c * x), 0, x))(none),
        (torch.tensor(0.0), none),
    )
    same(way(lambda n: fori_loop(1, 6, lambda i, p: p * i, n))(torch.tensor(2)), torch.tensor(240))
    same(way(lambda n: fori_loop(3, 1, lambda i, p: p * i, n))(torch.tensor(2)), torch.tensor(2))


@pytest.mark.parametrize("batch", [None, 1, 2, 5, 9])
def test_map_is_vmap_with_less_memory(batch: int | None) -> None:
    rows = {"a": torch.randn(5, 3, generator=generator), "b": torch.randn(5, generator=generator)}

    def fn(row: Any) -> Any:
        return {"s": (row["a"] * row["b"]).sum(), "t": row["a"].sin()}

    want = vmap(fn)(rows)
    for way in (lambda f: f, TRANSFORMS["jit"]):
        same(way(lambda rows: map(fn, rows, batch))(rows), want)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: scan(body, (H, 0), XS, 3), "length=3, but xs has 7 rows"),
        (lambda: scan(lambda c, x: (c, x), H), "must be given: length="),
        (lambda: scan(lambda c, x: (c, x), H, {"a": H, "b": H[:2]}), r"\['a'\] \[3\] and xs"),
        (lambda: scan(lambda c, x: (c, x), H, {"a": H, "b": 2}), "'b'] is 2, without a leading dim"),
        (lambda: scan(lambda c, x: (c, x), "s", H), "carry is 's'; the carry must be tensors"),
        (lambda: scan(lambda c, x: c, H, H), r"test_scan.py:\d+ .*returned Tensor, not a pair"),
        (lambda: scan(lambda c, x: (c.float(), x), H, H), r"float64\[3\], and the body returned float32"),
        (lambda: scan(lambda c, x: ((c, c), x), H, H), "must have the structure of carry"),
        (lambda: scan(lambda c, x: (c, x), H, H, unroll=0), "unroll=0.*at least one iteration"),
        (lambda: map(lambda x: x, ()), "there are no rows"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(LoopError, match=said):
        call()
