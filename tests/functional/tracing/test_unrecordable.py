"""Calls that a trace may not be able to record: each equals the plain call, or is refused by line."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import Mesh, MeshTensor, P, PurityError, checkpoint, full, jit, place, repeat, shard

X, CLOSED = torch.tensor([0.5, 1.5, -1.0]), torch.tensor([2.0, 3.0, 4.0])
MESH = Mesh({"dp": 2}, virtual=True)
Fn = Callable[[Tensor], Any]


class Other(Tensor):
    """A class of tensors that nothing is defined for."""


def _looped(fn: Fn) -> Fn:
    def loop(x: Tensor) -> Any:
        return repeat(lambda _, c, y: (c, fn(y)), torch.zeros(1), x, x, collect=True)[1][0]

    return jit(loop, backend="eager")


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "jit": lambda fn: jit(fn, backend="eager"),
    "shard": lambda fn: shard(fn, MESH),
    "checkpoint": checkpoint,
    "loop": _looped,
}


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def swapped(x: Tensor) -> Tensor:
    a, b = x.clone(), x * 2
    torch.utils.swap_tensors(a, b)
    return a


def other_memory(x: Tensor) -> Tensor:
    return x.clone().set_((x * 2).untyped_storage())  # type: ignore[arg-type]  # all of it


def of_a_tensor(x: Tensor) -> Tensor:
    return x.clone().set_(x * 2)


def resized(x: Tensor) -> Tensor:
    return x.clone().resize_(2)


def reassigned(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x * 2
    return y


def sparse(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), x, (3,)).to_dense()


def compressed(x: Tensor) -> Tensor:
    rows = torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), x, (3, 3))
    return rows.to_dense()[0]


def sparse_gradient(x: Tensor) -> Tensor:
    table = x[:, None].detach().requires_grad_()
    rows = F.embedding(torch.tensor([0, 2, 2]), table, sparse=True).sum()
    return torch.autograd.grad(rows, table)[0].to_dense()


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0)[0]


def jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x, x[:2]], layout=torch.jagged).values()[:3]


CALLS: dict[str, Fn] = {
    "tolist": lambda x: x + sum(x.tolist()),
    "tolist of a global": lambda x: x + sum(CLOSED.tolist()),
    "item of a global": lambda x: x + CLOSED[0].item(),
    "float": lambda x: x * float(x[0]),
    "int": lambda x: x * int(x[1]),
    "numpy": lambda x: x + float(x.numpy().sum()),
    "an array": lambda x: x + float(np.asarray(x).sum()),
    "exp of numpy": lambda x: torch.as_tensor(np.exp(x)),
    "an element of a storage": lambda x: x * float(x.untyped_storage()[0]),
    "bytes of a storage": lambda x: x * x.untyped_storage().nbytes(),
    "a list": lambda x: x + sum(list(CLOSED)),
    "a tensor of a list": lambda x: torch.tensor([x[0], x[1], x[2]]) * 2,
    "as_tensor": lambda x: torch.as_tensor([x[0], x[1], x[2]]) * 2,
    "a dictionary": lambda x: x * {x: 2}[x],
    "contains": lambda x: x * (1.5 in x),
    "nonzero": lambda x: x[x.nonzero()[:, 0]],
    "equal": lambda x: x * (2 if torch.equal(x, CLOSED) else 1),
    "apply_": lambda x: x.clone().apply_(lambda a: a + 1),
    "map_": lambda x: x.clone().map_(x, lambda a, b: a + b),
    "share_memory_": lambda x: x.clone().share_memory_(),
    "pickled": saved,
    "as_subclass": lambda x: x.as_subclass(Other).as_subclass(Tensor) * 2,
    "a parameter": lambda x: torch.nn.Parameter(x) * 2,
    "swap_tensors": swapped,
    "set_": other_memory,
    "set_ to a tensor": of_a_tensor,
    "resize_": resized,
    "data": reassigned,
    "sparse": sparse,
    "to_sparse": lambda x: x.to_sparse().to_dense(),
    "a sparse product": lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x[:, None])[:, 0],
    "compressed rows": compressed,
    "a sparse gradient": sparse_gradient,
    "nested": nested,
    "jagged": jagged,
    "placed": lambda x: place(x * 2, MESH, P()).full(),
    "spec of placed": lambda x: x * len(place(x * 2, MESH, P()).spec),
    "full": lambda x: full(place(x * 2, MESH, P())),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "drawn": lambda x: x * torch.manual_seed(0).initial_seed() + torch.randn(3),
    "bincount": lambda x: torch.bincount(x.abs().long()).float(),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|Sparse invariant).*:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_plain_call_or_is_refused(name: str, transform: str) -> None:
    fn = CALLS[name]
    try:
        have: Any = TRANSFORMS[transform](fn)(X.clone())
    except PurityError as error:
        assert "test_unrecordable.py:" in str(error)
    else:
        have = have.full() if isinstance(have, MeshTensor) else have
        torch.testing.assert_close(have, fn(X.clone()))
