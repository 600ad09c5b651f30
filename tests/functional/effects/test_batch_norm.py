"""Batch norm in programs: values, derivatives of any order, vmap, what it sends, against its formula."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap

from torchard import Mesh, P, PurityError, checkpoint, jit, shard, trace
from torchard.functional.torch_internals import FakeTensor

F64 = torch.float64
MESH = Mesh({"x": 2}, virtual=True)


def by_hand(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's documentation, in operations; what is written carries no gradient of the input."""
    dims, n = [0, *range(2, x.ndim)], x.numel() // x.shape[1]
    m, v = mean, var
    if training:
        v, m = torch.var_mean(x, dims, correction=0)
        unbiased = v.detach() * n / (n - 1)
        mean, var = 0.7 * mean + 0.3 * m.detach(), 0.7 * var + 0.3 * unbiased
    shape = (-1, *[1] * (x.ndim - 2))
    normed = (x - m.view(shape)) * (v.view(shape) + 0.1).rsqrt()
    return normed * w.view(shape) + b.view(shape), mean, var


def torchs(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, w, b, training, 0.3, 0.1), mean, var


Norm = Callable[..., tuple[Tensor, Tensor, Tensor]]


def number(norm: Norm, training: bool, *args: Tensor) -> Tensor:
    """One number of all results, with curvature."""
    out, mean, var = norm(*args, training)
    return (out**3 * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + (
        mean * var
    ).sum()


def slope(f: Callable[..., Tensor], at: int) -> Callable[..., Tensor]:
    """One number of a gradient."""
    return lambda *args: (grad(f, at)(*args) * args[at].detach().cos()).sum()


def push(f: Callable[..., Tensor], at: int) -> Callable[..., Tensor]:
    def pushed(*args: Tensor) -> Tensor:
        moved = lambda v: f(*args[:at], v, *args[at + 1 :])  # noqa: E731
        found: Tensor = jvp(moved, (args[at],), (args[at].detach().sin(),))[1]
        return found

    return pushed


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "checkpoint": checkpoint,
    "jit": lambda f: jit(f, backend="eager"),
    "shard": lambda f: shard(f, MESH, in_specs=(P("x"), P(), P(), P(), P()), out_specs=P()),
}


def inputs(rng: Random, rank: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    area = [rng.choice([1, 2, 3]) for _ in range(rank - 2)]
    x = torch.randn(rng.choice([3, 4, 5]), 2, *area, generator=made, dtype=F64)
    return [x, *(torch.rand(2, generator=made, dtype=F64) + 0.5 for _ in range(4))]


@given(st.integers(0, 1 << 30), st.integers(2, 5), st.booleans(), st.sampled_from(sorted(WRAPPED)))
@settings(max_examples=examples(ci=6, explore=400), deadline=None)
def test_derivatives_of_any_order(seed: int, rank: int, training: bool, how: str) -> None:
    """Of all inputs, the running statistics too (which torch refuses, or takes for constants)."""
    rng = Random(seed)
    args = inputs(rng, rank)
    run = WRAPPED[how](lambda *args: number(torchs, training, *args))
    want = lambda *args: number(by_hand, training, *args)  # noqa: E731
    orders = rng.choice(["", "r", "j", "rr", "rj", "jr", "jj", "rrr", "rjr", "jrr", "jjj", "rrj"])
    for order in orders:
        at = rng.randrange(5)
        run, want = ((slope if order == "r" else push)(f, at) for f in (run, want))
    torch.testing.assert_close(run(*args), want(*args), rtol=1e-8, atol=1e-8)


@given(st.integers(0, 1 << 30), st.integers(2, 5), st.booleans(), st.sampled_from(sorted(WRAPPED)))
@settings(max_examples=examples(ci=4, explore=300), deadline=None)
def test_vmap(seed: int, rank: int, training: bool, how: str) -> None:
    """Over any of the inputs; new statistics are mapped wherever anything they depend on is."""
    rng = Random(seed)
    args = inputs(rng, rank)
    mapped = [rng.random() < 0.5 for _ in args]
    mapped[rng.randrange(5)] = True
    stacked = [torch.stack([a, a * 0.5 + 0.3, 2 * a]) for a in args]
    many = [s if m else a for s, a, m in zip(stacked, args, mapped, strict=True)]
    fn = rng.choice(["values", "gradient"])

    def of(norm: Norm, wrap: Callable[[Any], Any] = lambda f: f) -> Callable[..., Any]:
        if fn == "values":
            return wrap(lambda *args: norm(*args, training))
        return slope(wrap(lambda *args: number(norm, training, *args)), rng_at)

    rng_at = rng.randrange(5)
    wrap = WRAPPED[how]
    dims = tuple(0 if m else None for m in mapped)
    have = vmap(of(torchs, wrap), dims)(*many)
    want = vmap(of(by_hand), dims)(*many)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stats, data", [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_half_precision(stats: str, data: str) -> None:
    """What is returned has torch's dtypes, values and gradients but for rounding."""
    kinds = [getattr(torch, data), *[getattr(torch, stats)] * 4]
    args = [a.to(k) for a, k in zip(inputs(Random(3), 4), kinds, strict=True)]
    specs = dict(in_specs=(P("x"), P(), P(), P(), P()), out_specs=(P(), P(), P()))
    want = torchs(*args, True)
    fn = lambda *args: torchs(*args, True)  # noqa: E731
    for run in (jit(fn, backend="eager"), shard(fn, MESH, **specs)):
        have = run(*args)
        for h, w in zip(have, want, strict=True):
            assert h.dtype == w.dtype
            torch.testing.assert_close(h, w, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrap", [checkpoint, WRAPPED["shard"]])
def test_second_derivatives_and_batches_of_gradients(wrap: Any, training: bool) -> None:
    """Of the input, whose statistics are functions of it too."""
    args = inputs(Random(5), 4)
    run = wrap(lambda *args: number(torchs, training, *args))
    want = lambda *args: number(by_hand, training, *args)  # noqa: E731
    torch.testing.assert_close(slope(slope(run, 0), 0)(*args), slope(slope(want, 0), 0)(*args))
    stacked = torch.stack([args[0], args[0].sin()])
    found, expected = (vmap(slope(f, 0), (0, *[None] * 4))(stacked, *args[1:]) for f in (run, want))
    torch.testing.assert_close(found, expected)


# -- what writes ------------------------------------------------------------------------------------


def test_running_statistics_of_the_caller_are_not_written() -> None:
    """Most schemas of batch norm's kernels do not say that they write."""
    x, w, b, mean, var = inputs(Random(1), 4)
    closed = lambda x: F.batch_norm(x, mean, var, w, b, True)  # noqa: E731
    for wrap in (checkpoint, trace, lambda f: jit(f, backend="eager")):
        with pytest.raises(PurityError, match="in place"):
            wrap(closed)(x)
        with pytest.raises(PurityError, match=r"args\[1\] in place"):
            wrap(lambda x, mean: F.batch_norm(x, mean, var, w, b, True))(x, mean)


def test_evaluation_writes_nothing() -> None:
    x, w, b, mean, var = inputs(Random(1), 4)
    closed = lambda x: F.batch_norm(x, mean, var, w, b, False)  # noqa: E731
    torch.testing.assert_close(checkpoint(closed)(x), closed(x))


def kernels() -> list[tuple[Any, tuple[Any, ...], bool, bool]]:
    """The kernels that torch has for batch norm, whichever a device would pick, and further arguments.

    Then whether they normalise by the batch, and whether they have running statistics.
    """
    aten = torch.ops.aten
    cases = [
        (aten._batch_norm_with_update.default, (0.3, 0.1), True, True),
        (aten._batch_norm_no_update.default, (0.3, 0.1), False, True),
    ]
    for name in ("native", "_native", "cudnn", "miopen"):
        op = getattr(aten, f"{name}_batch_norm{'_legit' if name == '_native' else ''}").default
        cases += [(op, (training, 0.3, 0.1), training, True) for training in (True, False)]
        if name != "_native":  # of which another overload has no running statistics
            cases.append((op, (True, 0.3, 0.1), True, False))
    return cases


@pytest.mark.parametrize(("op", "flags", "training", "tracked"), kernels(), ids=str)
def test_no_kernel_that_writes_is_left(
    op: Any, flags: tuple[Any, ...], training: bool, tracked: bool
) -> None:
    """Those of accelerators are only traced here: they become kernels that every device has."""
    x, w, b, *running = inputs(Random(2), 4)

    def norm(x: Tensor, *running: Tensor) -> tuple[Tensor, ...]:
        new = [r.clone() for r in running]
        return op(x, w, b, *(new if tracked else (None, None)), *flags)[0], *new

    def gradient(x: Tensor, *running: Tensor) -> Tensor:
        found: Tensor = grad(lambda x: (norm(x, *running)[0] ** 3).sum())(x)
        return found

    for fn in (norm, gradient):
        names = [str(node.target) for node in trace(fn)(x, *running).graph.nodes]
        assert not any(
            kind in name for name in names for kind in ("cudnn", "miopen", "legit.", "update")
        )
    want = by_hand(x, w, b, *running, training)
    torch.testing.assert_close(checkpoint(norm)(x, *running), want if tracked else (want[0], *running))
    slope = grad(lambda x: (by_hand(x, w, b, *running, training)[0] ** 3).sum())(x)
    torch.testing.assert_close(checkpoint(gradient)(x, *running), slope)


def test_parts_of_it_that_write_are_refused() -> None:
    x, _, _, mean, var = inputs(Random(2), 4)
    fn = lambda x: torch.batch_norm_update_stats(x, mean.clone(), var.clone(), 0.1)  # noqa: E731
    with pytest.raises(PurityError, match=r"calls aten.batch_norm_update_stats.*functional.batch_norm"):
        checkpoint(fn)(x)


# -- what crosses the network -----------------------------------------------------------------------


def test_statistics_cross_once() -> None:
    """Forward: mean and variance. Backward: two sums, which are the gradients of bias and weight."""
    channels = 6
    x = torch.randn(8, channels, 16, 16, dtype=F64)
    vectors = [torch.rand(channels, dtype=F64) for _ in range(4)]

    def loss(w: Tensor, b: Tensor, x: Tensor, mean: Tensor, var: Tensor) -> Any:
        out, *stats = torchs(x, w, b, mean, var, True)
        return (out**2).sum(), tuple(stats)

    step = lambda *args: torch.func.grad_and_value(loss, (0, 1), has_aux=True)(*args)  # noqa: E731
    for spec in (P("x"), P(None, None, "x"), P(None, "x")):
        split = P("x") if spec == P(None, "x") else P()
        run = shard(step, MESH, in_specs=(split, split, spec, split, split))
        sent = run.lower(vectors[0], vectors[1], x, *vectors[2:]).collectives
        rows = 0 if spec == P(None, "x") else 4
        assert sum(c.kind != "all_reduce" for c in sent) == 0, sent
        assert sum(torch.Size(c.shape).numel() for c in sent) <= rows * channels + 1, sent


def test_fakes_do_not_leak() -> None:
    x, w, b, mean, var = inputs(Random(1), 3)
    checkpoint(lambda *a: torchs(*a, True))(x, w, b, mean, var)
    assert not any(isinstance(v, FakeTensor) for v in (x, w, b, mean, var))
