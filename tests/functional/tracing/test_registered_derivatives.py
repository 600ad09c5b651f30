"""Operators whose derivative is registered in Python, under derivatives of any order.

torch.func refuses them, so each is held against the same function written with torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derivation_cases import TRANSFORMS, crossed, everywhere, same, whole
from derivations import DERIVATIONS, FORWARD, OUTERMOST, Derivation, batched
from torch.func import grad, jacfwd, jvp, vmap
from torch_version import TORCH

from torchard.functional.core.errors import DerivativeError

Fn = Callable[..., tuple[torch.Tensor, ...]]
Tensors = tuple[torch.Tensor, ...]

LIBRARY = torch.library.Library("torchard_formulas", "DEF")


@torch.library.custom_op("torchard_formulas::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("torchard_formulas::wave", mutates_args=())
def wave(
    x: torch.Tensor, y: torch.Tensor, power: int = 2, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin() * y**power * scale, x.cos() + y


@wave.register_fake
def _(x: Any, y: Any, power: int = 2, *, scale: float = 1.0) -> Any:
    return torch.empty_like(x), torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    x, y, ctx.power = inputs
    ctx.scale = keyword_only_inputs["scale"]
    ctx.save_for_backward(x, y)


def _wave_backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> Any:
    """Only what is wanted."""
    (x, y), n, scale = ctx.saved_tensors, ctx.power, ctx.scale
    of_x = g * x.cos() * y**n * scale - h * x.sin()
    of_y = g * x.sin() * n * y ** (n - 1) * scale + h
    return (
        of_x if ctx.needs_input_grad[0] else None,
        of_y if ctx.needs_input_grad[1] else None,
        None,
    )


wave.register_autograd(_wave_backward, setup_context=_keep)

@torch.library.custom_op("torchard_formulas::ranked", mutates_args=())
def ranked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.argsort(-1), x * 2


ranked.register_fake(lambda x: (torch.empty_like(x, dtype=torch.int64), torch.empty_like(x)))
# It keeps nothing, so that it has no setup_context.
ranked.register_autograd(lambda ctx, _, g: g * 2)


@torch.library.custom_op("torchard_formulas::underived", mutates_args=())
def underived(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


underived.register_fake(torch.empty_like)

LIBRARY.define("slope(Tensor x) -> Tensor")
LIBRARY.define("bend(Tensor x) -> Tensor")
LIBRARY.define("total(Tensor[] xs, Tensor? weight=None) -> Tensor")
LIBRARY.define("blunt(Tensor x) -> Tensor")
LIBRARY.define("rigid(Tensor x) -> Tensor")
LIBRARY.impl("slope", lambda x: 4 * x**3, "CompositeExplicitAutograd")
LIBRARY.impl("bend", lambda x: x**4, "CompositeExplicitAutograd")
LIBRARY.impl("blunt", lambda x: x.sin(), "CompositeExplicitAutograd")
LIBRARY.impl("rigid", lambda x: x.sin(), "CompositeExplicitAutograd")


def _total(xs: list[torch.Tensor], weight: torch.Tensor | None = None) -> torch.Tensor:
    found = sum((x * x for x in xs), start=torch.zeros_like(xs[0]))
    return found if weight is None else found * weight


def _keep_all(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.weighted = len(inputs) > 1 and inputs[1] is not None
    ctx.save_for_backward(*inputs[0], *(inputs[1:] if ctx.weighted else ()))


def _total_backward(ctx: Any, g: torch.Tensor) -> Any:
    *xs, weight = ctx.saved_tensors if ctx.weighted else (*ctx.saved_tensors, None)
    if weight is None:
        return ([2 * g * x for x in xs],)  # torch counts those that the caller gave
    return [2 * g * weight * x for x in xs], g * _total(xs)


def _total_of_batch(info: Any, in_dims: Any, xs: Any, weight: Any = None) -> Any:
    def front(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    of_xs, of_weight = (*in_dims, None)[:2]
    weight = None if weight is None else front(weight, of_weight)
    return ops.total([front(x, d) for x, d in zip(xs, of_xs, strict=True)], weight), 0


LIBRARY.impl("total", _total, "CompositeExplicitAutograd")
for _name in ("slope", "bend", "blunt", "rigid"):
    torch.library.register_fake(f"torchard_formulas::{_name}", torch.empty_like, lib=LIBRARY)
torch.library.register_fake(
    "torchard_formulas::total", lambda xs, weight=None: torch.empty_like(xs[0]), lib=LIBRARY
)
torch.library.register_vmap("torchard_formulas::total", _total_of_batch, lib=LIBRARY)
ops = torch.ops.torchard_formulas


def _keep_x(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _registered(name: str, backward: Any, keep: Any = _keep_x) -> None:
    torch.library.register_autograd(
        f"torchard_formulas::{name}", backward, setup_context=keep, lib=LIBRARY
    )


_registered("slope", lambda ctx, g: g * 12 * ctx.saved_tensors[0] ** 2)
# By an operator that has a registered derivative itself.
_registered("bend", lambda ctx, g: g * ops.slope(ctx.saved_tensors[0]))
_registered(
    "rigid", lambda ctx, g: torch.mul(g, ctx.saved_tensors[0].cos(), out=torch.empty_like(g))
)
_registered("total", _total_backward, _keep_all)


@dataclass(frozen=True)
class Pair:
    """A function with such operators, and the same of operations that torch differentiates."""

    registered: Fn
    plain: Fn


PAIRS: dict[str, Pair] = {
    "a custom operator": Pair(lambda x, y: (cube(x.sin()) * y,), lambda x, y: (x.sin() ** 3 * y,)),
    "two results": Pair(
        lambda x, y: wave(x, y, 3, scale=0.5),
        lambda x, y: (x.sin() * y**3 * 0.5, x.cos() + y),
    ),
    "indices beside a value, nothing kept": Pair(
        lambda x, y: (ranked(x * y)[1],), lambda x, y: (x * y * 2,)
    ),
    "defaults": Pair(lambda x, y: wave(x, y=y), lambda x, y: (x.sin() * y**2, x.cos() + y)),
    "one of two wanted": Pair(
        lambda x, y: (wave(x, y.detach())[0] + y,), lambda x, y: (x.sin() * y.detach() ** 2 + y,)
    ),
    "of a library": Pair(lambda x, y: (ops.slope(x) + y,), lambda x, y: (4 * x**3 + y,)),
    "by another operator": Pair(lambda x, y: (ops.bend(x * y),), lambda x, y: ((x * y) ** 4,)),
    "a list": Pair(lambda x, y: (ops.total([x, y, x]),), lambda x, y: (2 * x * x + y * y,)),
    "a list and a weight": Pair(
        lambda x, y: (ops.total([x.cos()], y),), lambda x, y: (x.cos() ** 2 * y,)
    ),
}
AT = (torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64))

BATCHED = Derivation("batched", batched(Random(1), 2).apply)
REVERSE = {d.name: d for d in (*DERIVATIONS, *OUTERMOST, BATCHED) if d.name not in FORWARD}


def twice(fn: Fn) -> Fn:
    return REVERSE["grad"](REVERSE["value_and_grad"](fn))


DEEP: dict[str, Callable[[Fn], Fn]] = {
    **REVERSE,
    "grad of value and grad": twice,
    "batch of second derivatives": lambda fn: BATCHED(REVERSE["hvp_by_gradients"](fn)),
    "gradient of a batch": lambda fn: REVERSE["grad"](BATCHED(fn)),
}


def shown(transform: Callable[[Fn], Fn], fn: Fn) -> Fn:
    """What a transform around a shard gives, whole."""
    return lambda *xs: whole(tuple(transform(fn)(*xs)))


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@crossed("pair", PAIRS)
@pytest.mark.parametrize("derivation", DEEP)
def test_derivatives_of_registered_operators(derivation: str, pair: str, name: str) -> None:
    derive, transform, pairs = DEEP[derivation], TRANSFORMS[name], PAIRS[pair]
    want = derive(pairs.plain)(*AT)
    same(tuple(derive(shown(transform, pairs.registered))(*AT)), tuple(want))
    if TORCH < (2, 13) and derivation == "jacobian" and len(pairs.plain(*AT)) > 1:
        pytest.skip("torch 2.11's jacrev of two results calls int(tensor), which no trace can follow")
    if derivation not in ("autograd", "autograd_twice"):
        same(shown(transform, derive(pairs.registered))(*AT), tuple(want))


FORWARDS: dict[str, Callable[[Fn], Fn]] = {
    "jvp": lambda fn: lambda x, y: jvp(fn, (x, y), (y, x))[1],
    "jacfwd": lambda fn: jacfwd(fn),
    "forward over reverse": lambda fn: jacfwd(REVERSE["grad"](fn)),
    "dual numbers": next(d for d in OUTERMOST if d.name == "dual_numbers"),
}


@crossed("pair", PAIRS)
@pytest.mark.parametrize("derivation", FORWARDS)
def test_no_tangent_is_lost(derivation: str, pair: str, name: str) -> None:
    """torch alone takes it to be zero."""
    derive, transform, fn = FORWARDS[derivation], TRANSFORMS[name], PAIRS[pair].registered
    for stacked in (derive(shown(transform, fn)), shown(transform, derive(fn))):
        with pytest.raises(DerivativeError, match=r"test_registered.*torchard_formulas.*forward"):
            stacked(*AT)


@everywhere
def test_tangents_of_other_values_pass(name: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sin() * cube(y)

    along = (AT[0].cos(),)
    want = jvp(lambda x: x.sin() * AT[1] ** 3, (AT[0],), along)[1]
    same(jvp(lambda x: whole(TRANSFORMS[name](fn)(x, AT[1])), (AT[0],), along)[1], want)


@everywhere
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the operator has no batching rule
def test_an_operator_without_a_derivative(name: str) -> None:
    loss = TRANSFORMS[name](lambda x: (ops.blunt(x) ** 2).sum())
    same(loss(AT[0]), AT[0].sin().square().sum())
    same(vmap(lambda x: whole(loss(x)))(AT[0]), AT[0].sin().square().sum(1))


@everywhere
def test_a_derivative_that_nobody_registered(name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (underived(x) ** 2).sum()

    same(TRANSFORMS[name](loss)(AT[0]), AT[0].sin().square().sum())
    with pytest.raises(RuntimeError, match=r"underived.*register_autograd"):
        grad(TRANSFORMS[name](loss))(AT[0])
    with pytest.raises(DerivativeError, match=r"test_registered.*underived.*autograd, or detach"):
        TRANSFORMS[name](grad(loss))(AT[0])


@everywhere
def test_a_formula_that_cannot_be_differentiated(name: str) -> None:
    """torch.func differentiates every backward in turn."""
    transform = TRANSFORMS[name]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (ops.rigid(x) * x).sum()

    same(grad(transform(loss))(AT[0]), AT[0].sin() + AT[0] * AT[0].cos())
    for stacked in (transform(grad(loss)), grad(lambda x: grad(transform(loss))(x).sum())):
        with pytest.raises(DerivativeError, match=r"test_registered.*rigid.*out="):
            stacked(AT[0])


CHUNKED: dict[str, Callable[[Fn], Fn]] = {
    **{d.name: d for d in DERIVATIONS},
    "autograd": REVERSE["autograd"],
    "autograd twice": REVERSE["autograd_twice"],
    "gradient of gradients": twice,
}


@pytest.mark.sampled(4)
@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has none yet")
@crossed("derivation", CHUNKED)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_in_chunks(reduction: str, derivation: str, name: str) -> None:
    """torch alone has one derivative of it, by torch.autograd, and tangents of zero."""
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    labels = torch.tensor([0, 2])

    def chunked(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss: Any = F.linear_cross_entropy
        return (loss(x, w, labels, reduction=reduction, options=chunks),)

    def plain(x: torch.Tensor, w: torch.Tensor) -> Any:
        return (F.cross_entropy(x @ w.T, labels, reduction=reduction),)

    at, derive, transform = (AT[0], torch.cat(AT)), CHUNKED[derivation], TRANSFORMS[name]
    want = tuple(derive(plain)(*at))
    same(tuple(derive(shown(transform, chunked))(*at)), want)
    if not derivation.startswith("autograd"):
        same(shown(transform, derive(chunked))(*at), want)
