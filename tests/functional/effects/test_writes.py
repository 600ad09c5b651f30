"""Writes in place become values; the views of what was written read the memory torch would read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from torchard import PurityError, checkpoint, jit, shard
from torchard.sharding import Mesh, P

torch.manual_seed(0)
X, Y = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

Write = Callable[[torch.Tensor, torch.Tensor], object]

# Into a value of x's shape, from one laid out the other way round.
WRITES: dict[str, Write] = {
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 0.5),
    "mul_": lambda x, y: x.mul_(y),
    "fill_": lambda x, y: x.fill_(2.0),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ of another dtype": lambda x, y: x.copy_(y.float()),
    "copy_ of a row": lambda x, y: x.copy_(y[0]),
    "scatter_": lambda x, y: x.scatter_(0, (y > 0).long() * 0, y),
    "index_fill_": lambda x, y: x.index_fill_(0, torch.tensor([1]), 0.5),
    "a column": lambda x, y: x[:, 0].copy_(y[:, 1]),
    "a column scaled": lambda x, y: x[:, 0].mul_(y[:, 1]),
    "clamp_": lambda x, y: x.clamp_(max=y),
    "sort into": lambda x, y: x.copy_(y.sort(dim=0).values),
}


def written(write: Write, turned: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        into = (x * 1).contiguous()
        if turned:
            write(into.t(), y)
        else:
            write(into, y.t())
        return into.view(6).cos() * into.view(3, 2).view(-1)

    return fn


@pytest.mark.parametrize("turned", [False, True], ids=["x", "x.t()"])
@pytest.mark.parametrize("name", WRITES)
def test_a_view_of_what_was_written(name: str, turned: bool) -> None:
    fn = written(WRITES[name], turned)
    y = Y if turned else Y.clone()
    want = fn(X, y)
    assert torch.equal(jit(fn, backend="eager")(X, y), want)
    sharded = shard(fn, Mesh({"x": 2}, virtual=True), in_specs=(P("x"), P()), out_specs=P())
    torch.testing.assert_close(sharded(X, y), want, rtol=1e-14, atol=1e-14)

    def slope(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        return grad(lambda x: f(x, y).sum())(X)

    torch.testing.assert_close(slope(jit(fn, backend="eager")), slope(fn), rtol=1e-14, atol=1e-14)
    many = [torch.stack([a, -a], -1) for a in (X, y)]
    have = vmap(jit(fn, backend="eager"), in_dims=-1)(*many)
    assert torch.equal(have, torch.stack([want, fn(-X, -y)]))


TURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.t().unsqueeze(0).squeeze_(0),
    "unsqueeze_": lambda x: x.t().unsqueeze_(-1),
    "t_, then written": lambda x: x.t_().mul_(2.0),
    "turned, then squeezed": lambda x: x[None].transpose_(1, 2).squeeze_(0),
    "lerp_ with a new dim": lambda x: x.t().unsqueeze_(-1).lerp_(Y[..., None], 0.3),
}


@pytest.mark.parametrize("name", TURNED)
def test_what_is_turned_in_place_has_its_new_shape(name: str) -> None:
    """Nothing is written: the value has other dims from then on."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return TURNED[name](x * 1).cos()

    want = fn(X)
    assert torch.equal(jit(fn, backend="eager")(X), want)
    sharded = shard(fn, Mesh({"x": 2}, virtual=True), in_specs=(P("x"),), out_specs=P())
    torch.testing.assert_close(sharded(X), want, rtol=1e-14, atol=1e-14)
    slopes = [grad(lambda x, f=f: f(x).sum())(X) for f in (jit(fn, backend="eager"), fn)]
    torch.testing.assert_close(*slopes, rtol=1e-14, atol=1e-14)


# -- in a transform that is called inside of another one -----------------------------------------------

NESTED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: jit(grad(checkpoint(f)), backend="eager"),
    "shard": lambda f: shard(
        grad(checkpoint(f)), Mesh({"x": 2}, virtual=True), in_specs=(P("x"), P()), out_specs=P()
    ),
    "twice": lambda f: checkpoint(grad(jit(checkpoint(f), backend="eager"))),
}


@pytest.mark.parametrize("how", NESTED)
def test_memory_of_an_inner_trace_is_its_own(how: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        into = x * 1
        into[:, :2] = x[:, 1:] * y[0]
        into.view(6).mul_(into.sum())
        return into.square().sum()

    torch.testing.assert_close(NESTED[how](fn)(X, Y), grad(fn)(X, Y))


@pytest.mark.parametrize("how", NESTED)
def test_arguments_of_an_inner_trace_are_not_written(how: str) -> None:
    with pytest.raises(PurityError, match=r"changes args\[0\] in place"):
        NESTED[how](lambda x, y: x[:, :2].mul_(y[0]).sum())(X, Y)


SQUARE = torch.arange(9.0, dtype=torch.float64).view(3, 3) / 7
SCALE = torch.tensor(0.7, dtype=torch.float64)
PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "chunk": lambda a: a.chunk(2, 0),
    "split": lambda a: a.split([2, 1], 1),
    "unbind": lambda a: a.unbind(0),
    "tensor_split": lambda a: a.tensor_split(2, 1),
    "hsplit": lambda a: a.hsplit(3),
    "vsplit": lambda a: a.vsplit(3),
    "iteration": list,
}
ROUND: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(lambda w: f(w, SQUARE).sum())(SCALE),
    "second": lambda f: grad(grad(lambda w: f(w, SQUARE).sum()))(SCALE),
    "jvp": lambda f: jvp(lambda w: f(w, SQUARE), (SCALE,), (SCALE,))[1],
    "vmap": lambda f: vmap(f, (None, 0))(SCALE, torch.stack([SQUARE, -SQUARE])),
    "vmap of grad": lambda f: vmap(grad(lambda w, x: f(w, x).sum()), (0, None))(SCALE * Y[0], SQUARE),
}
INSIDE: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, Mesh({"x": 3}, virtual=True), in_specs=(P(), P("x")), out_specs=P()),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", PARTS)
def test_a_write_into_one_of_several_views(name: str, inside: str) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a = x.clone()
        PARTS[name](a)[0].mul_(2)
        PARTS[name](a)[1].exp_()
        return (a * w).sin()

    for around in ROUND.values():
        torch.testing.assert_close(around(INSIDE[inside](fn)), around(fn), rtol=1e-12, atol=1e-12)
