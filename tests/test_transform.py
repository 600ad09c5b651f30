"""Transformed under every transform of torch, nested and not, against plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dummies import Identity, Mark, Pair, Split
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: F401
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional.transform import Transformed

F64 = torch.float64
REWRITES = {"identity": Identity(), "mark": Mark(), "split": Split()}


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ w["w1"] + w["b1"]) if isinstance(w, dict) else torch.tanh(x @ w)
    return (h * h.sin()).sum() if not isinstance(w, dict) else (h @ w["w2"]).sin().sum()


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, Pair) else value


def make(rewrite: str, how: str) -> Callable[..., Any]:
    r = REWRITES[rewrite]
    if how == "T":
        return Transformed(f, [r])
    if how == "TT":
        return Transformed(Transformed(f, [r]), [r])
    inner = Transformed(f, [r])
    return Transformed(grad(inner), [r])


def plain(how: str) -> Callable[..., Any]:
    return grad(f) if how == "TgradT" else f


def scalar(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *args: whole(function(*args)).square().sum()


CASES: dict[str, Callable[[Callable[..., Any], Any, Any], Any]] = {
    "call": lambda T, w, x: T(w, x),
    "grad": lambda T, w, x: grad(scalar(T))(w, x),
    "grad2": lambda T, w, x: grad(lambda w: grad(scalar(T))(w, x).sin().sum())(w),
    "grad3": lambda T, w, x: grad(
        lambda w: grad(lambda w: grad(scalar(T))(w, x).sin().sum())(w).cos().sum()
    )(w),
    "grad both": lambda T, w, x: grad(scalar(T), argnums=(0, 1))(w, x),
    "vmap": lambda T, w, x: vmap(lambda x: whole(T(w, x)))(torch.stack([x, x + 1, x * 2])),
    "vmap out": lambda T, w, x: vmap(lambda x: whole(T(w, x)), in_dims=1)(
        torch.stack([x, x + 1, x * 2], 1)
    ),
    "vmap vmap": lambda T, w, x: vmap(
        lambda w: vmap(lambda x: whole(T(w, x)))(torch.stack([x, x + 1]))
    )(torch.stack([w, w * 2, w - 1])),
    "vmap grad": lambda T, w, x: vmap(grad(scalar(T)), in_dims=(None, 0))(
        w, torch.stack([x, x + 1])
    ),
    "grad vmap": lambda T, w, x: grad(
        lambda w: vmap(scalar(T), in_dims=(None, 0))(w, torch.stack([x, x + 1])).sum()
    )(w),
    "jvp": lambda T, w, x: jvp(lambda w: whole(T(w, x)), (w,), (w.cos(),)),
    "jvp grad": lambda T, w, x: jvp(lambda w: grad(scalar(T))(w, x), (w,), (w.cos(),)),
    "grad jvp": lambda T, w, x: grad(
        lambda w: jvp(lambda w: whole(T(w, x)), (w,), (w.cos(),))[1].square().sum()
    )(w),
    "hessian": lambda T, w, x: hessian(scalar(T))(w, x),
    "jacrev": lambda T, w, x: jacrev(lambda w: whole(T(w, x)))(w),
    "jacfwd": lambda T, w, x: jacfwd(lambda w: whole(T(w, x)))(w),
    "make_fx grad": lambda T, w, x: make_fx(grad(scalar(T)))(w, x)(w, x),
    "make_fx vmap grad": lambda T, w, x: make_fx(vmap(grad(scalar(T)), in_dims=(None, 0)))(
        w, torch.stack([x, x])
    )(w, torch.stack([x, x + 1])),
}


def backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    scalar(T)(w, x).backward()
    return w.grad, x.grad


def double_backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    (first,) = torch.autograd.grad(scalar(T)(w, x), w, create_graph=True)
    first.sin().sum().backward()
    return first.detach(), w.grad, x.grad


def grad_below_backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    grad(scalar(T))(w, x).sin().sum().backward()
    return w.grad, x.grad


CASES |= {
    "backward": backward,
    "double backward": double_backward,
    "grad, then backward": grad_below_backward,
}


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-11) -> None:
    ours, theirs = (torch.utils._pytree.tree_leaves(x) for x in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["T", "TT", "TgradT"])
@pytest.mark.parametrize("rewrite", REWRITES)
def test_every_transform_of_a_transform(case: str, how: str, rewrite: str) -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    ours = CASES[case](make(rewrite, how), w, x)
    assert_same(
        torch.utils._pytree.tree_map(lambda v: v, whole(ours)), CASES[case](plain(how), w, x)
    )
