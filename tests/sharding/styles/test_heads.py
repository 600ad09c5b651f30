"""Heads are found in a trace: Colwise and Rowwise, told nothing, keep them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchard import (
    Colwise,
    Mesh,
    P,
    Rowwise,
    SpecError,
    functionalize,
    parallelize,
    place,
    shard,
    trace,
)
from torchard.sharding.styles.heads import units_of

TP = Mesh({"tp": 2}, virtual=True)
WIDTH, D = 8, 4
X = torch.linspace(-1, 1, 2 * 5 * WIDTH, dtype=torch.float64).reshape(2, 5, WIDTH)


class Attention(nn.Module):
    """q, k and v as ``project`` makes them, [batch, heads, position, d]; k and v are repeated."""

    def __init__(self, heads: int, groups: int | None = None, **linears: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups or heads
        for name, features in linears.items():
            setattr(self, name, nn.Linear(WIDTH, features))
        self.out = nn.Linear(heads * D, WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        projections: Any = (self.q, self.k, self.v)
        return tuple(self.split(layer(x)) for layer in projections)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    """q, k and v one after the other."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.split(t) for t in self.qkv(x).chunk(3, -1))  # type: ignore[operator]


class Sliced(Attention):
    """The same, taken one by one."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        fused, n = self.qkv(x), self.heads * D  # type: ignore[operator]
        return tuple(self.split(fused[..., i * n : (i + 1) * n]) for i in range(3))


class Interleaved(Attention):
    """q, k and v of each head together."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        fused = self.qkv(x).unflatten(-1, (self.heads, 3 * D))  # type: ignore[operator]
        return tuple(t.transpose(1, 2) for t in fused.chunk(3, -1))


class Stacked(Attention):
    """q, k and v as a dim that is indexed."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        fused = self.qkv(x).unflatten(-1, (3, self.heads, D))  # type: ignore[operator]
        return fused.permute(2, 0, 3, 1, 4).unbind(0)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.out(F.silu(gate) * up)


EACH = {"q": 12, "k": 12, "v": 12}
GROUPED = {"q": 24, "k": 12, "v": 12}
CASES: dict[str, tuple[nn.Module, dict[str, tuple[int, int]]]] = {
    "each": (Attention(3, **EACH), dict.fromkeys("qkv", (1, 3))),
    "grouped": (Attention(6, 3, **GROUPED), dict.fromkeys("qkv", (1, 3))),
    "fused": (Fused(3, qkv=36), {"qkv": (3, 3)}),
    "sliced": (Sliced(3, qkv=36), {"qkv": (3, 3)}),
    "interleaved": (Interleaved(3, qkv=36), {"qkv": (1, 3)}),
    "stacked": (Stacked(3, qkv=36), {"qkv": (3, 3)}),
    "gated": (Gated(), {"up": (2, 6)}),
}


@pytest.mark.parametrize("name", CASES)
def test_found(name: str) -> None:
    """Three heads over two ranks: nothing moves but the sum after the last product."""
    module, units = CASES[name]
    fn, params = functionalize(module.double())
    program = trace(fn)(params, X)
    found = units_of(program)
    for layer, want in units.items():
        assert found[f"{layer}.weight"] == (want, (1, WIDTH))
        assert found[f"{layer}.bias"] == (want,)
    assert found["out.weight"] == ((1, WIDTH), (1, next(iter(units.values()))[1]))

    plan = {**dict.fromkeys(units, Colwise()), "out": Rowwise()}
    specs, _ = parallelize(fn, TP, plan, program=program)
    run = shard(fn, TP, out_specs=P())
    placed = place(params, TP, specs)
    assert [c.kind for c in run.lower(placed, X).collectives] == ["all_reduce"]
    torch.testing.assert_close(run(placed, X), fn(params, X))


def test_what_is_told_goes_before_what_is_found() -> None:
    fn, params = functionalize(CASES["each"][0])
    program = trace(fn)(params, X)
    specs, _ = parallelize(fn, TP, {"q": Colwise(unit=2), "out": Rowwise()}, program=program)
    assert specs["q.weight"] == Colwise(unit=2)._split("tp", "after", 1, None)
    assert specs["out.weight"] == Rowwise(heads=3)._split("tp", "before", 1, 3)


def test_params_in_dicts() -> None:
    def f(p: Any, x: Tensor) -> Tensor:
        hidden = F.linear(x, p["block"]["up"]["weight"]).unflatten(-1, (3, 4))
        return F.linear(torch.tanh(hidden).flatten(-2), p["block"]["down"]["weight"])

    shapes = {"up": (12, WIDTH), "down": (WIDTH, 12)}
    params = {"block": {k: {"weight": torch.ones(s).double()} for k, s in shapes.items()}}
    plan = {"*.up": Colwise(), "*.down": Rowwise()}
    specs, _ = parallelize(params, TP, plan, program=trace(f)(params, X))
    told, _ = parallelize(params, TP, {"*.up": Colwise(heads=3), "*.down": Rowwise(heads=3)})
    assert specs == told


def test_features_that_nothing_divides_are_not_split() -> None:
    """Read as three times four and as four times three."""

    def f(p: Any, x: Tensor) -> Tensor:
        hidden = F.linear(x, p["up"]["weight"])
        return (
            hidden.unflatten(-1, (3, 4)).sum(-1).sum() + hidden.unflatten(-1, (4, 3)).sum(-2).sum()
        )

    params = {"up": {"weight": torch.ones(12, WIDTH, dtype=torch.float64)}}
    program = trace(f)(params, X)
    with pytest.raises(SpecError, match=r"plan\['up'\]: the 12 features of 'up' are needed together"):
        parallelize(params, TP, {"up": Colwise()}, program=program)
    parallelize(params, TP, {"up": Colwise(unit=1, heads=3)}, program=program)


def test_a_lone_head_is_not_split() -> None:
    """Queries share the one k and v: those are left to every rank, or the plan is refused."""
    fn, params = functionalize(Attention(3, 1, q=12, k=4, v=4).double())
    program = trace(fn)(params, X)
    with pytest.raises(SpecError, match=r"plan\['k'\]: the 4 features of 'k' are needed together"):
        parallelize(fn, TP, {"k": Colwise()}, program=program)
    specs, _ = parallelize(fn, TP, {"q": Colwise(), "out": Rowwise()}, program=program)
    run = shard(fn, TP, out_specs=P())
    placed = place(params, TP, specs)
    assert [c.kind for c in run.lower(placed, X).collectives] == ["all_reduce"]
    torch.testing.assert_close(run(placed, X), fn(params, X))


def test_a_trace_of_something_else() -> None:
    fn, params = functionalize(Gated().double())
    other = trace(lambda p, x: fn(p, x))({k: v for k, v in params.items()}, X)
    with pytest.raises(SpecError, match=r"not a trace of this model: .* no 'k\.bias'.* trace\(fn\)"):
        parallelize(CASES["each"][0], TP, {"q": Colwise()}, program=other)
