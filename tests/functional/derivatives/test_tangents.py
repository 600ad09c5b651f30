"""Tangents of results that share memory, or repeat it: torch lays a tangent out as its primal is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivation_cases import TRANSFORMS, X, crossed, same, whole
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

SHARING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sum, which has a repeated gradient": lambda x: x.sum(),
    "a sum expanded": lambda x: x.sum().expand(3),
    "a constant expanded": lambda x: (x.sin(), x.new_ones(()).expand(3)),
    "rows repeated": lambda x: (x * x).unsqueeze(0).expand(2, *x.shape),
    "the argument repeated": lambda x: (x.unsqueeze(-1).expand(*x.shape, 2), x.cos()),
    "pieces of one value, an empty one among them": lambda x: (x * 2).split([1, 0, 2], -1),
    "the argument itself and views of it": lambda x: (x, x.movedim(-1, 0), x[..., 1:]),
    "a view of a constant": lambda x: (x.sin(), x.new_ones(4, 3)[1:, ::2]),
    "a view of what is stopped": lambda x: (x.sin(), x.detach().exp()[..., 1:]),
    "of one element": lambda x: x.mean().expand(1, 1),
}


def by_dual_numbers(f: Any) -> Any:
    def pushed(x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            found = whole(f(forward_ad.make_dual(x, x.cos())))
            duals = map(
                forward_ad.unpack_dual, found if isinstance(found, (tuple, list)) else [found]
            )
            return [torch.zeros_like(p) if t is None else t for p, t in duals]

    return pushed


def by_jvp(f: Any) -> Any:
    return lambda x: jvp(f, (x,), (x.cos(),))


def total(f: Any) -> Any:
    def cubed(x: torch.Tensor) -> torch.Tensor:
        found = whole(f(x**3))
        return sum(
            o.square().sum() for o in (found if isinstance(found, (tuple, list)) else [found])
        )

    return cubed


PUSHED: dict[str, Callable[[Any], Any]] = {
    "jvp": by_jvp,
    "jvp of grad": lambda f: by_jvp(grad(total(f))),
    "hessian": lambda f: hessian(total(f)),
    "grad of jvp": lambda f: grad(lambda x: by_jvp(total(f))(x)[1]),
    "vmap of jvp": lambda f: vmap(by_jvp(f)),
    "jvp of vmap": lambda f: by_jvp(vmap(f)),
    "dual numbers": by_dual_numbers,
    "dual numbers of vmap": lambda f: by_dual_numbers(vmap(f)),
    "dual numbers of grad": lambda f: by_dual_numbers(grad(total(f))),
    "dual numbers of grad of grad": lambda f: by_dual_numbers(grad(total(grad(total(f))))),
    "dual numbers of vmap of grad": lambda f: by_dual_numbers(vmap(grad(total(f)))),
}


@pytest.mark.sampled(4)
@crossed("sharing", SHARING)
@pytest.mark.parametrize("pushed", PUSHED)
def test_tangents_of_results_that_share_memory(pushed: str, sharing: str, name: str) -> None:
    fn, derived, transform = SHARING[sharing], PUSHED[pushed], TRANSFORMS[name]
    same(derived(transform(fn))(X[:2]), derived(fn)(X[:2]))
