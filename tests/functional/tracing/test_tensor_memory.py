"""Copies, pickles and pointers of values of a trace: as in the plain call, or refused by line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import Tensor
from torch.func import grad, vmap

from torchard import Mesh, PurityError, checkpoint, jit, shard

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLOSED = torch.ones(3, dtype=torch.float64)

Function = Callable[[Tensor], Any]
TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jit": lambda fn: jit(fn, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda fn: shard(fn, Mesh({"dp": 2}, virtual=True)),
    "fuse": fuse,
}


def written(x: Tensor) -> Tensor:
    other = copy.deepcopy(x)
    other.mul_(2)
    return other + x


def written_value(x: Tensor) -> Tensor:
    y = x.sin()
    other = copy.deepcopy(y)
    y.add_(1)
    return other.cos() + y


COPIES: dict[str, Function] = {
    "an argument": lambda x: copy.deepcopy(x) * 2,
    "a value": lambda x: copy.deepcopy(x.sin()),
    "in a list": lambda x: copy.deepcopy([x, {"y": x.sin()}])[1]["y"],
    "twice": lambda x: torch.stack(copy.deepcopy([x, x])),
    "closed over": lambda x: x + copy.deepcopy(CLOSED),
    "written": written,
    "value written": written_value,
    "strided": lambda x: copy.deepcopy(x.T * 1).contiguous(),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", COPIES)
def test_deep_copies(name: str, transform: str) -> None:
    fn = COPIES[name]
    have = TRANSFORMS[transform](fn)(X)
    full = getattr(have, "full", lambda: have)()
    assert torch.equal(full, fn(X))


def test_gradients_do_not_pass_through_a_copied_leaf() -> None:
    def fn(x: Tensor) -> Tensor:
        return (copy.deepcopy(x) * x).sum()

    leaves = [X.clone().requires_grad_() for _ in range(2)]
    fn(leaves[0]).backward()
    jit(fn, backend="eager")(leaves[1]).backward()
    assert torch.equal(*[leaf.grad for leaf in leaves if leaf.grad is not None])


def views(x: Tensor) -> Tensor:
    first, second = copy.deepcopy([x, x[0]])
    second.zero_()
    return first * 1


def saved(x: Tensor) -> Tensor:
    torch.save(x, io.BytesIO())
    return x * 1


REFUSED: dict[str, Function] = {
    "copy": lambda x: copy.copy(x * 2),
    "pickle": lambda x: x * len(pickle.dumps(x)),
    "save": saved,
    "export": lambda x: torch.from_dlpack(x * 2),
    "address": lambda x: x * (x.data_ptr() == (x * 2).data_ptr()),
    "views": views,
    "inside": grad(lambda x: (copy.deepcopy(x) * x).sum()),
    "mapped": vmap(lambda x: copy.deepcopy(x) * 2),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_memory_is_refused_by_line(name: str, transform: str) -> None:
    with pytest.raises(PurityError, match=r"^test_tensor_memory\.py:\d+ in "):
        TRANSFORMS[transform](REFUSED[name])(X)


def test_a_copy_of_what_requires_gradients_is_refused_as_torch_refuses_it() -> None:
    def fn(x: Tensor) -> Tensor:
        return copy.deepcopy(x * 2)

    with pytest.raises(RuntimeError, match="graph leaves"):
        fn(X.clone().requires_grad_())
    with pytest.raises(PurityError, match="makes a deep copy"):
        jit(fn, backend="eager")(X.clone().requires_grad_())
