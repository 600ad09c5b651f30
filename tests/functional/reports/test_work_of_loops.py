"""The work of a rolled program is that of its unrolled form, and writes in place are counted as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

from torchard import Mesh, P, jit, repeat, shard
from torchard.functional.programs.unrolled import unrolled
from torchard.functional.reports.work import work_of

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)


def layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def chained(ws: Tensor, x: Tensor) -> Tensor:
    return repeat(layer, ws, x).square().sum()


def collected(ws: Tensor, x: Tensor) -> Tensor:
    x, ys = repeat(lambda w, x: (layer(w, x), x * 2), ws, x, collect=True)
    return x.sum() + ys.sum()


def nested(ws: Tensor, x: Tensor) -> Tensor:
    return repeat(lambda w, x: repeat(layer, w, x), ws.unflatten(0, (3, 2)), x).sum()


FUNCTIONS = (chained, collected, nested, grad(chained), grad(collected), grad(nested))


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_work_of_loops(fn: Callable[..., Any], meshed: bool) -> None:
    run = shard(fn, MESH, in_specs=(P(None, "tp"), P("dp"))) if meshed else jit(fn, backend="eager")
    program = run.lower(torch.zeros(6, 8, 8), torch.zeros(4, 8))
    assert work_of(program) == work_of(unrolled(program))


def test_work_of_writes() -> None:
    """What is read beside the base, and the elements that are written."""

    def fn(y: Tensor, x: Tensor, at: Tensor, mask: Tensor) -> list[Tensor]:
        y = y * 1
        rows = y.index_copy(0, at, x[None])
        y = rows.index_put((at, at), x[0])
        y = y.scatter(1, at[None], 2.0).masked_fill(mask, 0)
        return [y.slice_scatter(x[None, :2], 1, 0, 2).index_fill(1, at, 3)]

    args = torch.zeros(4, 6), torch.zeros(6), torch.tensor([1]), torch.zeros(4, 6, dtype=torch.bool)
    y, row, index, mask = 4 * 24, 4 * 6, 8, 24
    want = [
        2 * y,  # the product
        index + 2 * row,
        index + 4 + 4,  # both indices are one operand; one element
        index + 4,
        mask + y,
        8 + 4 * 2 * 4,  # two entries of x, in each of four rows
        index + 4 * 4,
    ]
    assert jit(fn, backend="eager").lower(*args).work.bytes == sum(want)
