"""Results of stacks, placed or plain, against those of the plain function."""

from __future__ import annotations

from typing import Any

from torch.func import vmap
from torch.utils._pytree import tree_leaves

from torchard import MeshTensor


def per_example(fn: Any) -> Any:
    return vmap(fn, in_dims=(None, 0))


def sgd(params: Any, gradients: Any) -> Any:
    return {k: params[k] - 0.1 * gradients[k] for k in params}


def compare(have: Any, want: Any, limit: float = 1e-10) -> None:
    got = tree_leaves(have, is_leaf=lambda v: isinstance(v, MeshTensor))
    expected = tree_leaves(want)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        a = a.full() if isinstance(a, MeshTensor) else a
        assert a.shape == b.shape
        assert (a - b).abs().max() <= limit * b.abs().max().clamp(min=1e-3)
