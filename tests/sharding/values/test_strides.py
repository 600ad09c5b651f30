"""Placed values may have any strides: kernels that take dense rows for granted get them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchard import Mesh, P, jit, place, random, shard

MESH = Mesh({"tp": 2}, virtual=True)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """The same values, the last dim not dense: what a gather along it brings."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("spec", [P(), P("tp"), P(None, "tp")], ids=str)
def test_attention_to_rows_that_are_not_dense(spec: P, compiled: bool) -> None:
    """Torch picks its kernel for the strides of what was traced, and the kernel trusts it."""
    whole = [random.normal(random.key(i), (2, 4, 8, 16), torch.float64) for i in range(3)]
    placed = [place(by_columns(x), MESH, spec) for x in whole]
    assert placed[0].parts[0].stride(-1) > 1

    def objective(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(*args)
        return out.square().sum(), out

    run = shard(objective, MESH)
    run = jit(run, backend="aot_eager") if compiled else run
    gradients, out = torch.func.grad(run, argnums=(0, 1, 2), has_aux=True)(*placed)
    wanted, want = torch.func.grad(objective, argnums=(0, 1, 2), has_aux=True)(*whole)
    torch.testing.assert_close(out.full(), want)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.full(), theirs)
