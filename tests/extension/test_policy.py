"""A policy written against public names: it keeps large results of products, and recomputes the rest."""

from __future__ import annotations

import torch

from torchard import checkpoint, policies, saved_residuals


def keep_large(op: str, shapes: policies.Shapes, scope: str, name: str | None) -> bool:
    return op in ("aten.mm", "aten.addmm") and torch.Size(shapes.result).numel() >= 64


def loss(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x @ a).tanh() @ b).tanh().sum()


def test_it_decides_what_is_kept() -> None:
    a, b, x = torch.ones(4, 16), torch.ones(16, 2), torch.ones(8, 4)
    kept = saved_residuals(checkpoint(loss, policy=keep_large), a, b, x)
    assert [(r.what, r.shape) for r in kept if r.kind == "value"] == [("aten.mm", (8, 16))]
    got = torch.func.grad(checkpoint(loss, policy=keep_large))(a, b, x)
    torch.testing.assert_close(got, torch.func.grad(loss)(a, b, x))
