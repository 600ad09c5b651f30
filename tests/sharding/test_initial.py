"""initialize: parameters made on the mesh are those made whole, and nothing is made whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchard import (
    Colwise,
    Mesh,
    P,
    PurityError,
    Rowwise,
    SpecError,
    functionalize,
    initialize,
    parallelize,
    random,
    shard,
)

KEY = random.key(3)
MESHES = [Mesh({"tp": 1}, virtual=True), Mesh({"tp": 3}, virtual=True)]
BOTH = Mesh({"dp": 2, "tp": 4}, virtual=True)


def init(name: str, key: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    return random.normal(key, shape, dtype) * 0.02


class Mlp(nn.Module):
    def __init__(self, n: int = 96) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


PLAN = {"up": Colwise(), "down": Rowwise()}


def made(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    with torch.device("meta"):
        fn, params = functionalize(Mlp().to(dtype))
    specs, _ = parallelize(fn, mesh, PLAN)
    return fn, initialize(init, params, mesh, specs, KEY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_do_not_depend_on_the_mesh(dtype: torch.dtype) -> None:
    (_, one), (_, three) = made(MESHES[0], dtype), made(MESHES[1], dtype)
    assert three["up.weight"].spec == P("tp", None) and three["down.bias"].spec == P(None)
    for name, value in one.items():
        assert torch.equal(value.full(), three[name].full())
    assert 0.018 < three["up.weight"].full().std() < 0.022
    assert not torch.equal(one["up.weight"].full(), one["down.weight"].full().t())


def test_what_is_made_goes_into_the_model() -> None:
    fn, params = made(MESHES[1])
    x = random.normal(KEY, (5, 96))
    whole = {k: v.full() for k, v in params.items()}
    torch.testing.assert_close(shard(fn, MESHES[1])(params, x).full(), fn(whole, x))


class Largest(TorchDispatchMode):
    """How many elements the largest tensor that is made has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_rank_makes_more_than_its_shard(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        params = {"w": torch.empty(64, 32, dtype=dtype), "v": torch.empty(16, 64, dtype=dtype)}
    with Largest() as largest:
        initialize(init, params, BOTH, {"w": P("tp", None), "v": P(None, ("dp", "tp"))}, KEY)
    words = 2 if dtype == torch.float64 else 1
    assert largest.elements == 64 * 32 // 4 * words


def test_a_parameter_does_not_depend_on_the_others() -> None:
    w = torch.empty(8, 4, device="meta")
    alone = initialize(init, {"block": {"w": w}}, BOTH, P("tp"), KEY)
    among = initialize(init, {"a": w, "block": {"w": w}, "z": w}, BOTH, P(), KEY)
    assert torch.equal(alone["block"]["w"].full(), among["block"]["w"].full())
    assert not torch.equal(among["a"].full(), among["z"].full())


def test_what_init_gets_wrong() -> None:
    w = {"w": torch.empty(8, 4, device="meta")}
    with pytest.raises(SpecError, match=r"init\('w', ...\) returned torch.float64 \[8\], but"):
        initialize(lambda *_: torch.zeros(8, dtype=torch.float64), w, BOTH, P(), KEY)
    with pytest.raises(PurityError, match="global"):
        initialize(lambda name, key, shape, dtype: torch.randn(shape), w, BOTH, P(), KEY)
    with pytest.raises(SpecError, match=r"'w'"):
        initialize(init, w, BOTH, {"v": P()}, KEY)
