"""reduce_dtype: sums over ranks in a wider dtype than their terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Mesh, P, place, shard

MESH = Mesh({"x": 4}, virtual=True)
BF16, F32 = torch.bfloat16, torch.float32


def numbers(*shape: int) -> Tensor:
    made = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, generator=made).to(BF16)


def off(value: Any, exact: Tensor) -> float:
    value = value if isinstance(value, Tensor) else value.full()
    assert value.dtype == BF16
    return float((value.double() - exact).norm())


# Of a [64, 16] split by rows: what a sum over them is, and into what it goes.
SUMS = {
    "product, all_reduce": (lambda a: a.mT @ a.sin(), P(), "all_reduce"),
    "product, psum_scatter": (lambda a: a.mT @ a.sin(), P("x"), "psum_scatter"),
    "product of a value and itself": (lambda a: a.mT @ a, P(), "all_reduce"),
    "batches of products": (
        lambda a: torch.bmm(a.view(64, 4, 4).permute(1, 2, 0), a.view(64, 4, 4).permute(1, 0, 2)),
        P(),
        "all_reduce",
    ),
    "sum": (lambda a: a.sum(0), P(), "all_reduce"),
    "mean": (lambda a: a.mean(0), P(), "all_reduce"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_wide_sum_is_as_close_as_one_device(name: str) -> None:
    fn, spec, kind = SUMS[name]
    a = numbers(64, 16)
    exact = fn(a.double())
    errors = {}
    for dtype in (None, F32):
        run = shard(fn, MESH, out_specs=spec, reduce_dtype=dtype)
        plan = run.lower(place(a, MESH, P("x"))).collectives
        assert {(c.kind, c.dtype) for c in plan} == {(kind, dtype or BF16)}
        errors[dtype] = off(run(place(a, MESH, P("x"))), exact)
    assert errors[F32] < errors[None]
    assert errors[F32] <= 1.2 * off(fn(a), exact)


def test_gradients_are_summed_widely() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh().sum()

    w, x = numbers(16, 8), numbers(64, 16)
    run = shard(torch.func.grad(loss), MESH, (P(), P("x")), P(), reduce_dtype=F32)
    assert [(c.kind, c.dtype) for c in run.lower(w, x).collectives] == [("all_reduce", F32)]
    exact = torch.func.grad(loss)(w.double(), x.double())
    assert off(run(w, x), exact) <= 1.05 * off(torch.func.grad(loss)(w, x), exact)
    outside = torch.func.grad(shard(loss, MESH, (P(), P("x")), reduce_dtype=F32))
    assert torch.equal(outside(w, x), run(w, x))


def test_what_is_wide_already_stays() -> None:
    run = shard(lambda a: a.sum(0), MESH, P("x"), P(), reduce_dtype=F32)
    a = numbers(64, 16).double()
    assert [c.dtype for c in run.lower(a).collectives] == [torch.float64]
    torch.testing.assert_close(run(a), a.sum(0))
    counts = shard(lambda a: (a > 0).sum(0), MESH, P("x"), P(), reduce_dtype=F32)
    assert [c.dtype for c in counts.lower(a).collectives] == [torch.int64]


def test_only_floats_are_summed() -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.int32\): sums over ranks are computed"):
        shard(lambda a: a, MESH, reduce_dtype=torch.int32)
