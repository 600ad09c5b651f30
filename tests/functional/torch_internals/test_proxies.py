"""The shorter way of recording operations: the same graphs as by torch's tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, jvp, vmap

from torchard import trace
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals import proxies

X = torch.randn(4, 6, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "numbers, dtypes and lists": lambda x: torch.cat([x.add(x, alpha=2), x[:, ::2].float()], 1),
    "several results": lambda x: (*torch.topk(x, 2), *x.split([1, 3]), *torch.var_mean(x, 0)),
    "a result that is not used": lambda x: torch.max(x, 0)[0],
    "written in place": lambda x: x.clone().unsqueeze_(0).add_(1).mul_(x).squeeze(0),
    "tensors made inside": lambda x: x + torch.arange(6, dtype=x.dtype) + torch.ones(4, 1),
    "constants": lambda x: x * torch.tensor(3.0) + torch.tensor([1, 2, 3, 4, 5, 6]).sum(),
    "complex numbers": lambda x: (x * (1 + 2j)).abs(),
    "operators that are made of others": lambda x: torch.einsum("ij,kj->ik", x, x).trace(),
    "views": lambda x: x.t().reshape(3, 8)[1:, :].expand(2, 2, 8),
    "a gradient": lambda x: grad(lambda x: torch.softmax(x, -1).log().sum())(x),
    "a tangent": lambda x: jvp(lambda x: x.sin() @ x.T, (x,), (x,))[1],
    "a batch": lambda x: vmap(lambda row: row.cumsum(0) * row.max())(x),
}


def described(fn: Any) -> list[tuple[Any, ...]]:
    """The nodes of a trace, with what is known of their values."""
    graph = trace(fn)(X).graph
    return [(n.op, n.name, n.target, str(n.args), str(n.kwargs), kinds(n)) for n in graph.nodes]


def kinds(node: fx.Node) -> Any:
    values = torch.utils._pytree.tree_leaves(VAL.get(node))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [(v.shape, v.stride(), v.dtype, v.storage_offset(), v.requires_grad) for v in tensors]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_that_of_torchs_tracer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(FUNCTIONS[name])
    monkeypatch.setattr(proxies, "_name_if_plain", lambda func: None)
    assert found == described(FUNCTIONS[name])


def test_operations_are_recorded_by_the_shorter_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there would be nothing to compare; constants are left to torch."""
    left: list[Any] = []
    theirs = proxies.ProxyTorchDispatchMode.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        left.append(str(func))
        return theirs(self, func, types, args, kwargs)

    monkeypatch.setattr(proxies.ProxyTorchDispatchMode, "__torch_dispatch__", counted)
    trace(grad(lambda x: torch.softmax(x @ x.T, -1).log().sum()))(X)
    assert not left
    trace(lambda x: x * torch.tensor(3.0))(X)
    assert left[0] == "aten.lift_fresh.default"
