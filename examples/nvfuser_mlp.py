"""Tensor parallelism in bf16, derived from the specs of the weights: the MLP of nvFuser's tests.

    python examples/nvfuser_mlp.py                          # two ranks inside this process
    torchrun --nproc-per-node 2 examples/nvfuser_mlp.py     # two processes

Only the parameters are given specs; the layouts of activations, of GELU's float32 intermediates and of
the dropout mask follow. nvFuser's own test allows an absolute error of 6. Here a first run takes small
integers, whose sums are exact in bf16 in any order, and must equal float64 exactly. A second run takes
normal weights, and its error must be at most twice that of one device in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _mesh import mesh_of
from torch import Tensor

from torchard import Mesh, P, nn, place, random, shard

Params = dict[str, Tensor]
KEY = random.key(1)
NAMES = ("linear1", "activation", "linear2", "dropout")
SPECS = {"w0": P("tp", None), "b0": P("tp"), "w1": P(None, "tp"), "b1": P()}


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, computed in float32."""
    return nn.gelu(x.float(), "tanh").to(x.dtype)


def mlp(act: Callable[[Tensor], Tensor], params: Params, x: Tensor, key: Tensor) -> list[Tensor]:
    """The four values that are compared."""
    y1 = nn.linear(x, params["w0"], params["b0"])
    hidden = act(y1)
    y2 = nn.linear(hidden, params["w1"], params["b1"])
    return [y1, hidden, y2, nn.dropout(key, y2, 0.1)]


def drawn(rows: int, width: int, std: float) -> tuple[Params, Tensor]:
    """Normally distributed parameters and input in bf16."""
    keys = random.split(random.key(0), 5).unbind()
    shapes = {
        "w0": (4 * width, width),
        "b0": (4 * width,),
        "w1": (width, 4 * width),
        "b1": (width,),
    }
    items = zip(shapes.items(), keys, strict=False)
    params = {k: nn.init_normal(key, shape, std, torch.bfloat16) for (k, shape), key in items}
    return params, random.normal(keys[4], (rows, width), torch.bfloat16)


def small(values: Params) -> Params:
    """Integers in place of normal numbers, mostly 0 and otherwise ±1: their sums stay below 256."""
    return {k: v.sign() * (v.abs() > 1.5 * v.float().std()) for k, v in values.items()}


def wide(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    """The parameters and the input in float64."""
    return {k: v.double() for k, v in params.items()}, x.double()


def run(mesh: Mesh, params: Params, x: Tensor, act: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The four values, computed on the mesh; prints their specs and the collectives."""
    fn = shard(functools.partial(mlp, act), mesh)
    placed = place(params, mesh, SPECS)
    plan = fn.lower(placed, x, KEY).collectives
    assert [(c.kind, c.axes, c.dtype) for c in plan] == [("all_reduce", ("tp",), torch.bfloat16)]
    values = fn(placed, x, KEY)
    specs = [value.spec for value in values]
    print(f"{plan}\n\n{', '.join(f'{k} {v}' for k, v in zip(NAMES, specs, strict=True))}\n")
    assert [spec.axes for spec in specs] == [("tp",), ("tp",), (), ()]
    return [value.full() for value in values]


def main(rows: int = 64, width: int = 128) -> None:
    params, x = drawn(rows, width, 0.02)
    with mesh_of(tp=2) as mesh:
        print(f"ReLU of small integers, over {mesh}:\n")
        integers = small(params), small({"x": x})["x"]
        ours, exact = run(mesh, *integers, nn.relu), mlp(nn.relu, *wide(*integers), KEY)
        for mine, theirs in zip(ours[:3], exact[:3], strict=True):  # a dropout divides by 0.9
            assert 0 < theirs.abs().max() <= 256
            assert torch.equal(mine.double(), theirs)
        print("equal to float64, bit for bit\n\nGELU of normal numbers:\n")

        ours, eager = run(mesh, params, x, gelu), mlp(gelu, params, x, KEY)
        exact = mlp(gelu, *wide(params, x), KEY)
        print("error against float64   sharded   one device, both in bf16")
        for name, *values in zip(NAMES, ours, eager, exact, strict=True):
            a, b, c = values
            mine, theirs = (float((value - c).abs().max()) for value in (a, b))
            print(f"{name:21} {mine:9.2e}    {theirs:9.2e}")
            # The sum over ranks is rounded to bf16 as well: two roundings instead of one.
            assert mine <= 2 * theirs


if __name__ == "__main__":
    main()
