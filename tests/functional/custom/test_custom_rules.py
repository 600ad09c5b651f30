"""custom_vjp and custom_jvp: right rules are the function's derivatives, of any order and kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import torchard as ta
from torchard import (
    DerivativeError,
    Mesh,
    P,
    checkpoint,
    cond,
    custom_jvp,
    custom_vjp,
    fori_loop,
    fuse,
    jit,
    place,
    shard,
    tree,
    while_loop,
)
from torchard.testing import check_derivatives

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 3, generator=generator, dtype=F64)
W = torch.randn(3, 3, generator=generator, dtype=F64)

Fn = Callable[..., Any]


def plain(x: Any, w: Any, k: float = 3.0) -> Any:
    """Results in a tree, an argument that is no tensor, and an integer result."""
    return {"a": torch.tanh(x @ w) * k, "b": [x.sin(), (x > 0).long()]}


backward = custom_vjp(plain)


def _fwd(x: Any, w: Any, k: float) -> Any:
    h = torch.tanh(x @ w)  # neither an argument nor a result
    return {"a": h * k, "b": [x.sin(), (x > 0).long()]}, (x, {"w": w, "h": h}, k)


def _bwd(residuals: Any, ct: Any) -> Any:
    x, kept, k = residuals
    assert ct["b"][1] is None
    inner = ct["a"] * k * (1 - kept["h"].square())
    return inner @ kept["w"].T + ct["b"][0] * x.cos(), x.T @ inner, None


backward.defvjp(_fwd, _bwd)
forward = custom_jvp(plain)


@forward.defjvp
def _rule(primals: Any, tangents: Any) -> Any:
    (x, w, k), (dx, dw, none) = primals, tangents
    assert none is None
    inner = (1 - torch.tanh(x @ w).square()) * k * (dx @ w + x @ dw)
    return forward(*primals), {"a": inner, "b": [x.cos() * dx, None]}


def total(fn: Fn) -> Fn:
    return lambda x, w: sum(leaf.square().sum() for leaf in tree.leaves(fn(x, w)))


def each(fn: Fn) -> Fn:
    """fn of each row."""
    return lambda x, w: vmap(lambda row: fn(row[None], w))(x)


def squares(gradients: Any) -> Any:
    return sum(g.square().sum() for g in gradients)


WAYS: dict[str, Callable[[Fn], Fn]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(total(f), (0, 1)),
    "grad of grad": lambda f: grad(lambda x, w: squares(grad(total(f), (0, 1))(x, w)), (0, 1)),
    "jvp": lambda f: lambda x, w: jvp(total(f), (x, w), (x.cos(), w.cos())),
    "jvp of jvp": lambda f: (
        lambda x, w: jvp(lambda x: jvp(total(f), (x, w), (x.cos(), w.cos()))[1], (x,), (x.sin(),))
    ),
    "jvp of grad": lambda f: lambda x, w: jvp(grad(total(f), (0, 1)), (x, w), (x.cos(), w.cos())),
    "grad of jvp": lambda f: grad(
        lambda x, w: jvp(total(f), (x, w), (x.cos(), w.cos()))[1], (0, 1)
    ),
    "vmap": each,
    "vmap of grad": lambda f: lambda x, w: vmap(lambda r: grad(total(f), (0, 1))(r[None], w))(x),
    "grad of vmap": lambda f: grad(total(each(f)), (0, 1)),
    "vmap of hessian": lambda f: lambda x, w: vmap(lambda r: hessian(total(f))(r[None], w))(x),
    "hessian of vmap": lambda f: hessian(total(each(f)), 1),
    "jvp of vmap": lambda f: lambda x, w: jvp(lambda x: each(f)(x, w)["a"], (x,), (x.cos(),)),
    "vmap of vmap": lambda f: (
        lambda x, w: vmap(lambda s: vmap(lambda r: grad(total(f), 1)(s * r[None], w))(x))(x[:2, 0])
    ),
}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "plain": lambda f: f,
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": lambda f: shard(f, Mesh({"a": 2}, virtual=True)),
    "all": lambda f: shard(jit(checkpoint(f), backend="eager"), Mesh({"a": 3}, virtual=True)),
}
RULES = {"custom_vjp": backward, "custom_jvp": forward}


def same(have: Any, want: Any) -> None:
    have = tree.map(ta.full, have)
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_right_rules_are_the_derivatives(way: str, transform: str, rule: str) -> None:
    want = WAYS[way](plain)(X, W)
    same(TRANSFORMS[transform](WAYS[way](RULES[rule]))(X, W), want)
    same(WAYS[way](TRANSFORMS[transform](RULES[rule]))(X, W), want)


@pytest.mark.parametrize("rule", RULES)
def test_outside_of_torch_func(rule: str) -> None:
    found = []
    for fn in (plain, RULES[rule]):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(total(fn)(x, W), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    same(found[1], found[0])


@pytest.mark.parametrize("rule", RULES)
def test_under_a_compiler(rule: str) -> None:
    same(jit(grad(total(RULES[rule]), (0, 1)))(X, W), grad(total(plain), (0, 1))(X, W))


def test_a_rule_may_state_something_else() -> None:
    """The straight-through estimator, in branches and loops too."""
    rounded = custom_vjp(torch.round)
    rounded.defvjp(lambda x: (x.round(), None), lambda _, ct: (ct,))

    def f(x: Any) -> Any:
        x = fori_loop(0, 2, lambda i, x: 2 * rounded(x), x)
        x = cond(x.sum() > 0, lambda x: 3 * rounded(x), torch.zeros_like, x)
        return while_loop(lambda x: x.sum() < 100, lambda x: 5 * rounded(x), x, max_steps=4).sum()

    for run in (f, jit(f, backend="eager"), checkpoint(f)):
        same(grad(run)(torch.tensor([0.6, 0.7], dtype=F64)), torch.full((2,), 60.0, dtype=F64))


def test_an_argument_that_is_returned() -> None:
    reversal = custom_vjp(lambda x: x)
    reversal.defvjp(lambda x: (x, None), lambda _, ct: (-ct,))
    x = torch.ones(2)
    for run in (reversal, jit(reversal, backend="eager"), checkpoint(reversal)):
        same(grad(lambda x, run=run: run(x).sum())(x), -x)


def test_static_arguments_come_first() -> None:
    @custom_vjp
    def power(x: Any, n: int) -> Any:
        return x**n

    @lambda f: custom_vjp(f, nondiff_argnums=(0, 2))
    def scaled(n: int, x: Any, name: str) -> Any:
        return n * x

    power.defvjp(lambda x, n: (x**n, (x, n)), lambda r, ct: (r[1] * r[0] ** (r[1] - 1) * ct, None))
    scaled.defvjp(lambda n, x, name: (n * x, None), lambda n, name, _, ct: (n * ct + len(name),))
    x = torch.tensor([2.0, 3.0])
    same(grad(lambda x: power(x, n=3).sum())(x), 3 * x**2)
    same(grad(lambda x: scaled(2, x, "abc").sum())(x), torch.full((2,), 5.0))


def test_methods() -> None:
    class Scale:
        def __init__(self, k: float) -> None:
            self.k = k

        @custom_vjp
        def scaled(self, x: Any) -> Any:
            return x * self.k

    Scale.scaled.defvjp(lambda self, x: (x * self.k, self.k), lambda k, ct: (None, ct * k))
    two, three = Scale(2.0), Scale(3.0)
    for run in (lambda f: f, lambda f: jit(f, backend="eager")):
        same(grad(run(lambda x: two.scaled(three.scaled(x)).sum()))(X), torch.full_like(X, 6.0))


def test_rules_for_each_argument() -> None:
    product = custom_jvp(lambda x, y, n: x * y * n)
    product.defjvps(lambda t, ans, x, y, n: t * y * n, lambda t, ans, x, y, n: x * t * n, None)
    want = grad(lambda x, y: (x * y * 2).sum(), (0, 1))(X, X.cos())
    same(grad(lambda x, y: product(x, y, 2).sum(), (0, 1))(X, X.cos()), want)


def test_a_rule_is_planned_like_any_code() -> None:
    """The MLP of Megatron, its activation with a rule: one all_reduce."""
    silu = custom_vjp(lambda h: torch.nn.functional.silu(h))

    def bwd(h: Any, ct: Any) -> Any:
        s = torch.sigmoid(h)
        return (ct * s * (1 + h * (1 - s)),)

    silu.defvjp(lambda h: (torch.nn.functional.silu(h), h), bwd)
    mesh = Mesh({"tp": 2}, virtual=True)
    weights = place(torch.randn(3, 8), mesh, P(None, "tp")), place(torch.randn(8, 3), mesh, P("tp"))
    x = place(torch.randn(4, 3), mesh, P())
    step = shard(grad(lambda p, x: (silu(x @ p[0]) @ p[1]).square().sum()), mesh)
    assert [each.kind for each in step.lower(weights, x).collectives] == ["all_reduce"]


def test_a_changed_rule_is_traced_again() -> None:
    factor = 2.0
    scaled = custom_vjp(lambda x: x.clone())
    scaled.defvjp(lambda x: (x.clone(), None), lambda _, ct: (ct * factor,))
    run, x = grad(jit(lambda x: scaled(x).sum(), backend="eager")), torch.ones(2)
    same(run(x), 2 * x)
    factor = 5.0
    same(run(x), 5 * x)


def test_a_rule_may_read_what_the_function_does_not() -> None:
    """In a body that is run again for a derivative, when the trace around it has ended."""
    scaled = custom_vjp(lambda x, y: x.clone())
    scaled.defvjp(lambda x, y: (x.clone(), y), lambda y, ct: (ct * y, None))

    def f(x: Any, y: Any) -> Any:
        return fori_loop(0, 2, lambda i, c: scaled(c, y), x).sum()

    for run in (grad(f), checkpoint(grad(jit(f, backend="eager"))), jit(grad(checkpoint(f)))):
        same(run(X[0], W[0]), W[0] ** 2)


@pytest.mark.parametrize("transform", ["plain", "jit", "shard"])
@pytest.mark.parametrize(
    "way",
    [
        lambda f: grad(f, 1),
        lambda f: lambda x, w: jvp(lambda w: f(x, w), (w,), (w,)),
        lambda f: lambda x, w: vmap(grad(f, 1), (None, 0))(x, torch.stack([w, w])),
        lambda f: lambda x, w: f(x.clone().requires_grad_(), w.clone().requires_grad_()),
    ],
)
def test_what_would_lose_a_derivative_is_refused(way: Any, transform: str) -> None:
    def outer(x: Any, w: Any) -> Any:
        scaled = custom_vjp(lambda x: x * w)
        scaled.defvjp(lambda x: (x[0] * w, None), lambda _, ct: (ct * w,))
        return scaled(x[:1]).sum()

    run = way(TRANSFORMS[transform](outer))
    with pytest.raises(DerivativeError, match=r"<lambda> reads a tensor of shape \[3\].*argument"):
        run(X, W[0])


def test_what_is_closed_over_may_be_constant() -> None:
    def outer(x: Any, w: Any) -> Any:
        scaled = custom_vjp(lambda x: x * w)
        scaled.defvjp(lambda x: (x * w, None), lambda _, ct: (ct * w,))
        return scaled(x).sum()

    for run in (outer, jit(outer, backend="eager")):
        same(grad(run)(X, W[0]), W[0].expand(4, 3))


def _wrong(fwd: Fn, bwd: Fn) -> Fn:
    product = custom_vjp(lambda x, y: x * y)
    product.defvjp(fwd, bwd)
    return lambda x, y: product(x, y).sum()


@pytest.mark.parametrize(
    ("fwd", "bwd", "said"),
    [
        (lambda x, y: x * y, lambda r, ct: (ct, ct), r"fwd of <lambda> returned .*a pair"),
        (lambda x, y: (x * y, x), lambda r, ct: ct, r"tuple of 2"),
        (lambda x, y: (x * y, x), lambda r, ct: (ct,), r"returned a tuple of 1.*tuple of 2"),
        (
            lambda x, y: (x * y, x),
            lambda r, ct: (ct.sum(), ct),
            r"float64\[\].*argument 0.*\[4, 3\]",
        ),
        (lambda x, y: (x * y, x), lambda r, ct: ({"a": ct}, ct), r"argument 0.*structure"),
    ],
)
def test_what_a_rule_returns_is_checked(fwd: Fn, bwd: Fn, said: str) -> None:
    with pytest.raises(DerivativeError, match=rf"(?s)test_custom_rules.py.*{said}"):
        grad(_wrong(fwd, bwd))(X, X)


def test_a_function_without_a_rule_is_refused() -> None:
    for decorator in (custom_vjp, custom_jvp):
        without = decorator(lambda x: x.sum())
        assert without(X) == X.sum()
        with pytest.raises(DerivativeError, match=r"has no rule: give it one by <lambda>.def"):
            grad(without)(X)


def test_tensors_are_no_static_arguments() -> None:
    scaled = custom_vjp(lambda k, x: k * x, nondiff_argnums=0)
    scaled.defvjp(lambda k, x: (k * x, None), lambda k, _, ct: (k * ct,))
    with pytest.raises(DerivativeError, match=r"argument 0 of <lambda> has tensors"):
        grad(lambda x: scaled(X, x).sum())(X)


@pytest.mark.parametrize(
    ("bwd", "argument"),
    [
        (lambda r, ct: (1.01 * r[1] * ct, r[0] * ct), 0),  # by 1 %
        (lambda r, ct: (r[1] * ct, -r[0] * ct), 1),  # the sign
        (lambda r, ct: (r[1] * ct, None), 1),  # an argument is missing
    ],
)
def test_check_derivatives_names_a_wrong_rule(bwd: Fn, argument: int) -> None:
    product = custom_vjp(lambda x, y: x * y)
    product.defvjp(lambda x, y: (x * y, (x, y)), bwd)
    line = r"test_custom_rules.py:\d+ in <lambda>"
    said = rf"the rule of <lambda> \({line}\) is off by .*argument {argument}"
    with pytest.raises(AssertionError, match=said):
        check_derivatives(lambda x, y: product(x.sin(), y), X, X.cos())


def test_check_derivatives_accepts_right_rules() -> None:
    for rule in RULES.values():
        assert len(check_derivatives(lambda x, w, rule=rule: rule(x, w)["a"], X, W)) == 2
