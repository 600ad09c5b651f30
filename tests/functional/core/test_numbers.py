"""Operations along a dim of a tensor that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from derivation_cases import F64, TRANSFORMS, X, crossed, same, whole
from torch.func import grad, jvp, vmap

OF_A_NUMBER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: lambda x, name=name: getattr(x, name)(0)  # type: ignore[misc]
    for name in (
        *("sum", "mean", "norm", "amax", "amin", "prod", "logsumexp", "softmax"),
        *("log_softmax", "cumsum", "cumprod", "squeeze", "unsqueeze", "flatten", "flip", "argmax"),
    )
} | {
    "var": lambda x: x.var(0, correction=0) + x,
    "max": lambda x: x.max(0).values,
    "sort": lambda x: x.sort(0).values,
    "a norm": lambda x: (
        F.normalize(x, dim=0) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    ),
    "permute": lambda x: x.permute(()).transpose(0, -1).movedim(0, -1),
    "gather": lambda x: x.gather(0, torch.tensor(0)),
    "index_select": lambda x: x.index_select(0, torch.tensor(0)),
    "scatter": lambda x: x.scatter_add(0, torch.tensor(0), x),
    "index_add": lambda x: x.index_add(0, torch.tensor(0), x),
}


@crossed("of_a_number", OF_A_NUMBER, [*TRANSFORMS, "shard", "fuse"])
def test_dims_of_a_number(of_a_number: str, name: str) -> None:
    """A tensor without dims has a dim 0, for operations along one."""
    fn, transform, x = OF_A_NUMBER[of_a_number], TRANSFORMS[name], X[0, 0].exp()

    def product(f: Any) -> Any:
        """The gradient, and its derivative along a direction."""

        def squared(x: torch.Tensor) -> torch.Tensor:
            return whole(f(x)).to(F64).square().sum()

        return lambda x: jvp(grad(squared), (x,), (x.cos(),))

    same(transform(fn)(x), fn(x))
    same(product(transform(fn))(x), product(fn)(x))
    same(transform(product(fn))(x), product(fn)(x))
    if of_a_number not in ("flip", "cumprod"):  # torch has no rule for batches of numbers
        same(vmap(transform(fn))(X[0].exp()), vmap(fn)(X[0].exp()))
