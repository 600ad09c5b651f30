"""A dropout mask is a function of the key and of each element's place: no mesh or spec changes it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import Mesh, MeshTensor, P, functionalize, nn, place, random, shard

SHAPE, RATE = (5, 6, 3), 0.4
KEY = random.key(3)
X = torch.linspace(1, 2, 90, dtype=torch.float64).reshape(SHAPE)

MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 4}]


def specs(axes: tuple[str, ...]) -> Iterator[P]:
    """Every way in which axes can split three dims, two on one dim in both orders."""
    for dims in itertools.product([None, 0, 1, 2], repeat=len(axes)):
        for order in itertools.permutations(axes):
            at = dict(zip(axes, dims, strict=True))
            entries = [tuple(a for a in order if at[a] == d) for d in range(3)]
            if order == axes or any(len(e) > 1 for e in entries):
                yield P(*[e or None for e in entries])


def stateless(x: Tensor) -> Tensor:
    return nn.dropout(KEY, x, RATE)


@functools.cache
def of_module() -> Callable[[Tensor], Tensor]:
    fn, params = functionalize(torch.nn.Dropout(RATE))
    return lambda x: fn(params, x, key=KEY)


DROPS = {"nn.dropout": lambda: stateless, "a module's": of_module}


def whole(value: Tensor | MeshTensor) -> Tensor:
    return value.full() if isinstance(value, MeshTensor) else value


def test_every_spec_is_there() -> None:
    assert len(set(specs(("x",)))) == len(list(specs(("x",)))) == 4
    assert len(set(specs(("x", "y")))) == len(list(specs(("x", "y")))) == 19


def both(x: Tensor) -> list[Tensor]:
    """Of each kind of dropout the value, and a gradient that is 0 where the value is."""

    def square(drop: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return drop(x).square().sum()

    drops = [make() for make in DROPS.values()]
    slopes = [torch.func.grad(functools.partial(square, drop))(x) for drop in drops]
    return [drop(x) for drop in drops] + slopes


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_mask_is_the_same_everywhere(axes: dict[str, int]) -> None:
    """Of the value and of its gradient; nothing crosses the network for either."""
    mesh, want = Mesh(axes, virtual=True), both(X)
    assert all(0 < (value == 0).sum() < X.numel() for value in want)
    assert not torch.equal(want[0], want[1])
    for spec in specs(tuple(axes)):
        x, step = place(X, mesh, spec), shard(both, mesh, out_specs=spec)
        assert not step.lower(x).collectives, spec
        for have, one in zip(step(x), want, strict=True):
            assert torch.equal(whole(have), one), spec


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("spec", [P("x"), P(None, ("y", "x")), P("y", None, "x")], ids=str)
def test_a_backward_from_outside_has_the_mask_of_its_forward(spec: P, drop: str) -> None:
    """The two halves are programs of their own: a mask that is drawn again is the same one."""
    f, mesh = DROPS[drop](), Mesh({"x": 2, "y": 4}, virtual=True)
    x = place(X, mesh, spec)
    run = shard(f, mesh, out_specs=spec)
    value, pullback = torch.func.vjp(run, x)
    (slope,) = pullback(value)
    assert not run.lower_joint(x).collectives
    assert torch.equal(whole(value), f(X))
    assert torch.equal(whole(slope), f(f(X)))


class Attention(torch.nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, self.mask, 0.5)


def test_a_mask_of_attention_is_added_or_chooses() -> None:
    chosen = torch.ones(6, 6, dtype=torch.bool).tril(2)
    added = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~chosen, -torch.inf)
    fn, other = (functionalize(Attention(mask))[0] for mask in (chosen, added))
    assert torch.equal(fn({}, X, key=KEY), other({}, X, key=KEY))
    higher = functionalize(Attention(added + 1))[0]
    torch.testing.assert_close(higher({}, X, key=KEY), fn({}, X, key=KEY))


class Dropped(torch.nn.Module):
    def forward(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p)


def test_rates_at_and_beyond_the_ends() -> None:
    fn, _ = functionalize(Dropped())
    for rate in (-0.5, 1.5):
        with pytest.raises(ValueError, match=rf"dropout probability is {rate}; it must lie in \[0, 1\]"):
            fn({}, X, rate, key=KEY)
    assert torch.equal(fn({}, X, 0.0, key=KEY), X)
    for module in (torch.nn.Dropout(1.0), torch.nn.AlphaDropout(1.0)):
        assert not functionalize(module)[0]({}, X, key=KEY).any()
