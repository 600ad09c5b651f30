"""The shorter way of recording operations: the same graphs as by torch's tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.func import grad, jvp, vmap

from torchard import optim, trace
from torchard.functional.programs.tags import ORIGIN, PHASE, SCOPE, SOURCE, VAL
from torchard.functional.torch_internals import proxies, storage_id
from torchard.functional.torch_internals.operators import aten

X = torch.randn(4, 6, dtype=torch.float64)
SHAPES = ((4, 6), (6, 4), (3, 4, 6))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
LEAVES = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans())
HALVES = (torch.float32, torch.float64, torch.float32)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(Tensor.t, lambda y: y.reshape(-1), lambda y: y.view_as(y), Tensor.neg, Tensor.clone),
    *(lambda y: aten._unsafe_view(y.contiguous(), [24]), torch.empty_like, lambda y: y.conj() + y.real),
)


def in_default(dtype: torch.dtype, fn: Callable[[], Tensor]) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return fn()
    finally:
        torch.set_default_dtype(before)


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
    "equal numbers of several types": lambda x: [x.int() + n for n in (1, 1.0, True, 1 + 0j, 1)],
    "the default dtype": lambda x: [in_default(d, lambda: x.int() / 2) for d in HALVES],
    "views and copies": lambda x: [f(y) for y in (x.t(), x.t().contiguous(), x.t()) for f in VIEWS],
    "offsets, and memory of other sizes": lambda x: [(y[1:] + 1, y[1:3].t()) for y in (x, x[:3], x)],
    "a gradient": lambda x: grad(lambda x: torch.softmax(x, -1).log().sum())(x),
    "a tangent": lambda x: jvp(lambda x: x.sin() @ x.T, (x,), (x,))[1],
    "a batch": lambda x: vmap(lambda row: row.cumsum(0) * row.max())(x),
}


def described(fn: Any, *args: Any) -> list[tuple[Any, ...]]:
    """The nodes of a trace, with their tags and what is known of their values."""
    first: dict[int, str] = {}
    graph = trace(fn)(*(args or (X,))).graph
    return [
        (n.op, n.name, n.target, str(n.args), str(n.kwargs), kinds(n), memory(n, first), tags(n))
        for n in graph.nodes
    ]


def memory(node: fx.Node, first: dict[int, str]) -> list[tuple[str, int]]:
    """The first nodes that share a node's memory, and the sizes of that."""
    tensors = [v for v in torch.utils._pytree.tree_leaves(VAL.get(node)) if isinstance(v, Tensor)]
    named = [first.setdefault(storage_id(v), node.name) for v in tensors]
    return [(name, v.untyped_storage().nbytes()) for name, v in zip(named, tensors, strict=True)]


def tags(node: fx.Node) -> list[str]:
    return [str(tag.get(node)) for tag in (SOURCE, SCOPE, PHASE, ORIGIN)]


def kinds(node: fx.Node) -> Any:
    values = torch.utils._pytree.tree_leaves(VAL.get(node))
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [(v.shape, v.stride(), v.dtype, v.storage_offset(), v.requires_grad) for v in tensors]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_that_of_torchs_tracer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(FUNCTIONS[name])
    monkeypatch.setattr(proxies, "_name_if_plain", lambda func: None)
    assert found == described(FUNCTIONS[name])


@settings(max_examples=20)
@given(st.lists(LEAVES, min_size=2, max_size=6))
def test_steps_of_equal_leaves_have_the_graph_of_torchs_tracer(
    leaves: list[tuple[tuple[int, ...], torch.dtype, bool]],
) -> None:
    optimizer = optim.adamw(0.1)
    params = [torch.zeros(shape, dtype=dtype) for shape, dtype, _ in leaves]
    params = [p.mT if turned else p for p, (_, _, turned) in zip(params, leaves, strict=True)]
    args = optimizer.update, params, optimizer.init(params), params
    found = described(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxies, "_name_if_plain", lambda func: None)
        assert found == described(*args)


def test_the_results_of_equal_operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there would be nothing to compare."""
    called: list[Any] = []
    call = proxies._Proxying._call

    def counted(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(func)
        return call(self, func, *args, **kwargs)

    monkeypatch.setattr(proxies._Proxying, "_call", counted)
    graph = trace(lambda x: [(x + 1).t().neg() for _ in range(5)])(X).graph
    assert len(called) == 3 < len(graph.find_nodes(op="call_function", target=aten.neg.default)) + 1


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
