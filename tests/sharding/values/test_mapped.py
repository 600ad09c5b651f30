"""torch.func around shard: vmap, jacrev, jacfwd and hessian with plain and placed arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, vmap

from torchard import Mesh, MeshTensor, P, full, place, shard, tree
from torchard.sharding.values.mesh import PlacementError

MESH = Mesh({"dp": 2}, virtual=True)
SPECS = (P("dp"), P(None, "dp"), P())


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cumsum(1).sum(1)


def _check(found: Any, want: torch.Tensor) -> None:
    found = found.full() if isinstance(found, MeshTensor) else found
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev, hessian])
@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_jacobians_with_respect_to_a_plain_argument(jacobian: Any, spec: P) -> None:
    x = _x(4, 6)
    run = shard(_rows, MESH, in_specs=spec, out_specs=P("dp"))
    _check(jacobian(run)(x), jacobian(_rows)(x))


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_jacobians_with_respect_to_a_placed_argument(jacobian: Any, spec: P) -> None:
    x = _x(4, 6)
    _check(jacobian(shard(_rows, MESH))(place(x, MESH, spec)), jacobian(_rows)(x))


def test_the_jacobian_of_as_many_results_as_a_shard_has() -> None:
    """The dims of a result's shard and of the argument are alike: what is split must not change."""
    x, weight = _x(2), _x(4, 2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (weight @ x).sin()

    _check(jacfwd(shard(fn, MESH, out_specs=P("dp")))(x), jacfwd(fn)(x))
    with pytest.raises(PlacementError, match=r"shard\(jacrev\(f\)\)"):
        jacrev(shard(fn, MESH, out_specs=P("dp")))(x).full()
    _check(shard(jacrev(fn), MESH)(x), jacrev(fn)(x))


@pytest.mark.parametrize("in_dim, spec", [(0, P(None, "dp")), (1, P("dp")), (-1, P("dp")), (1, P())])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_vmap_over_a_dim_that_is_not_split(in_dim: int, spec: P, out_dim: int) -> None:
    x = _x(4, 4, 6).sum(-1) + _x(4, 4)

    def fn(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return row.cumsum(0) * other

    dims = {"in_dims": (in_dim, None), "out_dims": out_dim}
    found: Any = vmap(shard(fn, MESH), **dims)(place(x, MESH, spec), _x(4))
    _check(found, vmap(fn, **dims)(x, _x(4)))


@pytest.mark.parametrize("out_dim", [0, 1])
def test_a_batch_of_as_many_as_a_shard_has(out_dim: int) -> None:
    x = _x(2, 4)
    run = shard(torch.sin, MESH, in_specs=P("dp"), out_specs=P("dp"))
    _check(vmap(run, out_dims=out_dim)(x), vmap(torch.sin, out_dims=out_dim)(x))


def test_vmap_over_a_split_dim_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"along dim 0, which is split.*shard\(vmap\(f\)\)"):
        vmap(shard(torch.sin, MESH))(place(_x(4, 6), MESH, P("dp")))


def _layer(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    bias, out = params["rest"]
    return torch.tanh(x @ params["w"].T + bias) @ out.T


TREES: dict[str, Callable[..., Any]] = {
    "one": _layer,
    "a dict": lambda params, x: {"y": _layer(params, x), "n": [params["w"].square().sum(0)]},
    "a number": lambda params, x: _layer(params, x).square().sum(),
}
PARAMS = {"w": _x(5, 3), "rest": (_x(5), _x(2, 5))}
PARAM_SPECS = (P(), {"w": P("dp"), "rest": P()}, {"w": P(None, "dp"), "rest": (P(), P(None, "dp"))})


JACOBIANS = [*itertools.product([jacfwd, jacrev], TREES), (hessian, "a number")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("jacobian, name", JACOBIANS)
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=str)
@pytest.mark.parametrize("params", PARAM_SPECS, ids=str)
@pytest.mark.parametrize("spec", [P(), P("dp")], ids=str)
def test_jacobians_of_and_with_respect_to_trees(
    jacobian: Any, name: str, placed: bool, argnums: Any, params: Any, spec: P
) -> None:
    fn, x = TREES[name], _x(8, 3)
    run = shard(fn, MESH) if placed else shard(fn, MESH, in_specs=(params, spec))
    args = (place(PARAMS, MESH, params), place(x, MESH, spec)) if placed else (PARAMS, x)
    found, want = full(jacobian(run, argnums=argnums)(*args)), jacobian(fn, argnums=argnums)(PARAMS, x)
    assert tree.structure(found) == tree.structure(want)
    for have, expected in zip(tree.leaves(found), tree.leaves(want), strict=True):
        torch.testing.assert_close(have, expected)
