"""replaced: another function computes what a part of a module did, with the part's own weights."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor, nn
from torch.func import grad, vmap

from torchard import (
    KernelError,
    Mesh,
    NoMatch,
    Pattern,
    functionalize,
    replaced,
    shard,
    trace,
)

ROWS, D, H = 6, 4, 8
RUN = ["0", "1", "2"]


def run() -> nn.Sequential:
    """Its ReLU stands at two places."""
    torch.manual_seed(3)
    relu = nn.ReLU()
    parts = nn.Linear(D, H), nn.LayerNorm([ROWS, H]), relu, nn.Linear(H, D), relu
    module = nn.Sequential(*parts).double()
    nn.init.normal_(module[1].weight)
    nn.init.normal_(module[1].bias)
    return module


def norm_by_hand(params: dict[str, Tensor], x: Tensor) -> Tensor:
    d = x - x.mean((-2, -1), keepdim=True)
    scale = torch.rsqrt(d.square().mean((-2, -1), keepdim=True) + 1e-5)
    return d * scale * params["weight"] + params["bias"]


def fused(params: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.linear(x, params["0.weight"], params["0.bias"])
    return norm_by_hand({k: params[f"1.{k}"] for k in ("weight", "bias")}, hidden).relu()


X = torch.randn(ROWS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CASES = [pytest.param("1", norm_by_hand, id="one"), pytest.param(RUN, fused, id="run")]


@pytest.mark.parametrize(("path", "block"), CASES)
def test_weights_are_kept_and_the_original_too(path: Any, block: Any) -> None:
    module = run()
    before, printed = {k: v.clone() for k, v in module.state_dict().items()}, repr(module)
    other = replaced(module, path, block)
    mine, its = module.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    assert list(mine) == list(its) and all(mine[k] is its[k] for k in mine)
    assert all(type(module[i]).__module__.startswith("torch.") for i in range(5))
    torch.testing.assert_close(other(X), module(X))
    fresh = run()
    fresh.load_state_dict(other.state_dict())
    other.load_state_dict(fresh.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    assert repr(module) == printed and block.__name__ in repr(other)
    assert isinstance(other[1], nn.LayerNorm) and other[1].eps == module[1].eps


@pytest.mark.parametrize(("path", "block"), CASES)
def test_every_transform(path: Any, block: Any) -> None:
    fn, params = functionalize(run())
    other, same = functionalize(replaced(run(), path, block))
    assert list(params) == list(same)

    def loss(f: Any, params: Any, x: Tensor) -> Tensor:
        return f(params, x).sin().sum()

    torch.testing.assert_close(other(params, X), fn(params, X))
    want, have = (grad(lambda p, f=f: loss(f, p, X))(params) for f in (fn, other))
    torch.testing.assert_close(have, want)
    many = torch.stack([X, 2 * X, X - 1])
    for f in (other, replaced(run(), path, block)):
        call = (lambda x, f=f: f(params, x)) if f is other else f
        torch.testing.assert_close(vmap(call)(many), vmap(lambda x: fn(params, x))(many))
    mesh = Mesh({"tp": 2}, virtual=True)
    torch.testing.assert_close(shard(other, mesh)(params, X).full(), fn(params, X))
    # The library's pattern of the operations finds the block's, in the block's own scope.
    pattern = Pattern(lambda x, w, b: norm_by_hand({"weight": w, "bias": b}, x), name="norm")
    run_ = fuse(other, pattern, compiler="eager")
    (use,) = run_.lower(params, X).kernels
    assert (use.kernel, use.scope) == ("norm", path[0])
    torch.testing.assert_close(run_(params, X), fn(params, X))


class Layer(nn.Module):
    """A buffer and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.inner = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.layers[2].inner[0].weight = self.layers[0].inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, scale=1.0 + i)
        return x


def net() -> Net:
    torch.manual_seed(5)
    found = Net().double()
    found(X), found(X + 1)  # statistics of its own
    return found.eval()


def counted(block: Any) -> tuple[Any, list[Any]]:
    calls: list[Any] = []

    def counting(params: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((sorted(params), kwargs))
        return block(params, *args, **kwargs)

    return counting, calls


def batch_norm(p: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, p["running_mean"], p["running_var"], p["weight"], p["bias"])


def layer(p: Any, x: Tensor, *, scale: float) -> Tensor:
    normed = batch_norm({k[5:]: v for k, v in p.items() if k.startswith("norm.")}, x)
    hidden = torch.tanh(F.linear(normed, p["inner.0.weight"], p["inner.0.bias"]))
    return x + scale * F.linear(hidden, p["inner.2.weight"], p["inner.2.bias"])


def up(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, p["0.weight"], p["0.bias"]))


@pytest.mark.parametrize(
    ("path", "block", "times"),
    [
        ("layers.*.norm", batch_norm, 3),
        ("layers.1", layer, 1),
        ("layers.*", layer, 3),
        (["*.0", "*.1"], up, 0),  # outermost are the layers themselves
        (["*inner.0", "*inner.1"], up, 3),
        (["layers.[02].inner.[01]"], up, 2),
        ("", lambda p, x: x.sin().cos(), 1),
    ],
)
def test_many(path: Any, block: Any, times: int) -> None:
    """By patterns; buffers and keyword arguments are handed on, tied weights stay tied."""
    module = net()
    counting, calls = counted(block)
    if not times:
        with pytest.raises(KernelError, match=r"the parent of 'layers\.0', is not one"):
            replaced(module, path, counting)
        return
    other = replaced(module, path, counting)
    want = X.sin().cos() if path == "" else module(X)
    torch.testing.assert_close(other(X), want)
    assert len(calls) == times
    named = [part for part in other.modules() if "counting[" in type(part).__name__]
    assert isinstance(path, list) or len(named) == times
    assert path != "layers.*" or calls[2][1] == {"scale": 3.0}
    if path != "":
        fn, params = functionalize(other)
        torch.testing.assert_close(fn(params, X), want)
        assert sum("tanh" in str(node.target) for node in trace(fn)(params, X).calls) == 3
        slopes = grad(lambda p: fn(p, X).square().sum())(params)
        original, _ = functionalize(module)
        torch.testing.assert_close(slopes, grad(lambda p: original(p, X).square().sum())(params))


def test_the_copy_is_a_module_like_any() -> None:
    """It is copied, cast and trained; a part that stands at two places is replaced at one."""
    counting, calls = counted(lambda p, x: torch.relu(x))
    other = replaced(run(), "4", counting)
    other(X)
    assert len(calls) == 1 and type(other[2]) is nn.ReLU
    up = run()[0]
    twice = nn.Sequential(up, nn.Linear(H, D).double(), up)
    once = replaced(twice, "2", lambda p, x: F.linear(x, p["weight"], p["bias"]).tanh())
    assert once.state_dict().keys() == twice.state_dict().keys()
    torch.testing.assert_close(once(X), twice(X).tanh())
    half = copy.deepcopy(replaced(run(), RUN, fused)).bfloat16().train()
    assert half(X.bfloat16()).dtype == torch.bfloat16
    twin, mine = run(), replaced(run(), RUN, fused)
    for module in (twin, mine):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(X).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(mine.state_dict(), twin.state_dict())
    alone = replaced(run().float(), "0", lambda p, x: F.linear(x, p["weight"], p["bias"]))
    with torch.autocast("cpu", torch.bfloat16):
        assert alone[0](X.float()).dtype == torch.bfloat16


def test_no_weights_stay_behind() -> None:
    other = replaced(run(), RUN, fused)
    old = weakref.ref(other[1].weight)
    other.load_state_dict(run().state_dict(), assign=True)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("5", NoMatch, "no submodule has the path '5'; there are '0', '1', '2', '3', '4'"),
        (["0", "x.*"], NoMatch, "no submodule has the path 'x.*'"),
        (["0", "2"], KernelError, "'1' is missing from the run that begins at '0'."),
    ],
)
def test_wrong_paths(path: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        replaced(run(), path, fused)
    assert said in str(raised.value) and f"replaced(Sequential, {path!r})" in str(raised.value)


def test_what_is_no_run() -> None:
    for path, said in (
        (["layers.0.norm", "layers.0.inner"], "'layers.0', the parent of 'layers.0.norm', is not one"),
        (["layers.0.inner.0", "layers.1.inner.1"], "'layers.1.inner.1' is missing from the run"),
        (["layers.0.inner", "layers.0.inner.0"], "'layers.0.inner.0' is missing from the run"),
    ):
        with pytest.raises(KernelError) as raised:
            replaced(net(), path, up)
        assert said in str(raised.value) and "or replace each on its own" in str(raised.value)
    once = replaced(net(), "layers.0.inner", lambda p, x: x)
    for path in ("layers.0.inner", "layers.0.inner.1", "layers.*.inner.1"):
        with pytest.raises(KernelError, match="already replaced; start from the original"):
            replaced(once, path, up)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda p, x: x[..., 0], r"float64\[6\], but the replaced module returns float64\[6, 8\]"),
        (lambda p, x: norm_by_hand(p, x).float(), r"float32\[6, 8\]"),
        (lambda p, x: (norm_by_hand(p, x),), r"\(float64\[6, 8\],\)"),
        (lambda p, x: None, "NoneType"),
    ],
)
def test_a_block_that_returns_something_else(wrong: Any, said: str) -> None:
    other = replaced(run(), "1", wrong)
    fn, params = functionalize(other)
    for call in (lambda: other(X), lambda: fn(params, X), lambda: trace(fn)(params, X)):
        with pytest.raises(KernelError, match=said) as raised:
            call()
        assert "replaced(Sequential, '1')" in str(raised.value)


class Tied(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D))
        self[2].weight = self[0].weight


def test_what_is_replaced_is_run_without_data() -> None:
    """Wherever it is called: no randomness is drawn, vmap does not mind it, tied weights are two."""

    def tied(p: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, p["0.weight"], p["0.bias"]), p["2.weight"], p["2.bias"])

    other = replaced(Tied(), ["0", "1", "2"], tied)
    state = torch.get_rng_state()
    other(X.float())
    assert torch.equal(torch.get_rng_state(), state)
    wrong = replaced(nn.Sequential(Tied()), "0", lambda p, x: tied(p, x)[0])
    with pytest.raises(
        KernelError, match=r"float32\[4\], but the replaced module returns float32\[6, 4\]"
    ):
        vmap(wrong)(torch.stack([X, X]).float())
