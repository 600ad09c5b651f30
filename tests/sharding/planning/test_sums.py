"""Sums that are rewritten before values are placed: equal padding is added once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import Mesh, shard

MESH = Mesh({"dp": 2}, virtual=True)


@pytest.mark.parametrize("first", [True, False])
def test_a_slice_and_one_of_several_results(first: bool) -> None:
    """The gradients that are added are a padded one, and one of those of a layer norm."""

    def loss(x: Tensor) -> Tensor:
        terms = [F.layer_norm(x, (4,)).pow(3).sum(), x[:2].square().sum()]
        return terms[not first] + terms[first]

    x = torch.randn(4, 4, dtype=torch.float64)
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(shard(gradient, MESH)(x).full(), gradient(x))
