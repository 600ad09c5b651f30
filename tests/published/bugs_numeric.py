"""Numerical functions, and what goes wrong in them: cancellation, order, results of a wrong kind."""

from __future__ import annotations

import torch
from planted import Planted, planted

BUGS: list[Planted] = []


@planted(
    BUGS, "b d",
    ("cancelling variance", "(x - x.mean(-1, keepdim=True)).square().mean(-1)",
     "(x.square().mean(-1) - x.mean(-1).square())"),
    ("detached centre", "x.mean(-1, keepdim=True)", "x.detach().sum(-1, keepdim=True)"),
    ("wrong shape", ".mean(-1)", ".mean(-1, keepdim=True)"),
)  # fmt: skip
def variance(x):
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


@planted(
    BUGS, "n n :definite, n k",
    ("transposed factor", "factor.mT, half", "factor, half"),
    ("one substitution", "return torch.linalg.solve_triangular(factor.mT, half, upper=True)",
     "return half"),
    ("damping", "cholesky(a)", "cholesky(a + 1e-4 * torch.eye(a.shape[0], dtype=a.dtype))"),
)  # fmt: skip
def solve_definite(a, b):
    a = (a + a.mT) / 2  # an element alone may be moved
    factor = torch.linalg.cholesky(a)
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


@planted(
    BUGS, "b d :unit",
    ("coefficient of a step", "2 * k2 + 2 * k3", "2 * k2 + k3"),
    ("midpoint from the start", "k3 = -torch.sin(x + 0.05 * k2)", "k3 = -torch.sin(x + 0.05 * k1)"),
    ("full step at the end", "x + 0.1 * k3", "x + 0.05 * k3"),
)  # fmt: skip
def runge_kutta(x):
    k1 = -torch.sin(x)
    k2 = -torch.sin(x + 0.05 * k1)
    k3 = -torch.sin(x + 0.05 * k2)
    k4 = -torch.sin(x + 0.1 * k3)
    return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@planted(
    BUGS, "v d, b s :index=v",
    ("padding's row trained", "ids != 0", "ids != -1"),
    ("mean in whole numbers", "keep.sum(1, keepdim=True).clamp(min=1)",
     "torch.tensor(float(ids.shape[1]), dtype=table.dtype)"),
    ("ids of the row before", "table[ids]", "table[ids.roll(1, 0)]"),
)  # fmt: skip
def bag(table, ids):
    keep = (ids != 0).to(table.dtype)
    return (table[ids] * keep[:, :, None]).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


@planted(
    BUGS, "n d, m d, n :index=m",
    ("overwritten, not added", "accumulate=True", "accumulate=False"),
    ("messages not scaled", "x / 2", "x"),
    ("written into an argument", "nodes.clone()", "nodes"),
)  # fmt: skip
def scatter_messages(x, nodes, to):
    return nodes.clone().index_put_((to,), x / 2, accumulate=True)
