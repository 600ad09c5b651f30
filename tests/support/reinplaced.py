"""What tests of writes in place share: operands, functions that write, and a count of writes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchard.functional.execution.sequencing import what_runs

__all__ = ["AT", "X", "Y", "counts", "of_an_argument", "transposed", "zeros"]

Y = torch.arange(24.0).reshape(4, 6)
X = torch.arange(1.0, 7.0)
AT = torch.tensor([2])


def counts(graph: fx.Graph, donated: list[int]) -> tuple[int, int]:
    """How many operations write, and how many have their value there already."""
    nodes = what_runs(graph, donated)[1].nodes
    return sum(not there for there in nodes.values()), sum(nodes.values())


def zeros(y: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[0] = x
    z[1, 2:4] = 1
    z[:, 5] += 3
    return z


def transposed(y: Tensor, x: Tensor) -> Tensor:
    return (y * 2).t().index_put((torch.arange(6)[:, None], AT), x[:, None]).t()


def of_an_argument(y: Tensor, x: Tensor) -> Tensor:
    return y.index_put((AT,), x).scatter(0, AT[None], 1.0)
