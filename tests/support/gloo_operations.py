"""Single operations on placed values over real ranks: what `gloo.py` runs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from eager_operations import OPERATIONS, operands, outcome

from torchard import Mesh, P, jit, place, shard

__all__ = ["CHECKS"]


def single_operations(rank: int, world: int) -> dict[str, float]:
    """The largest difference from plain torch of every fourth operation, gradients too."""
    mesh = Mesh({"a": world})
    found = {}
    for number, (name, operation) in enumerate(list(OPERATIONS.items())[::4]):
        places = [(P("a"), P()), (P(None, "a"), P("a"))][number % 2]
        x, y = (place(v, mesh, spec) for v, spec in zip(operands(), places, strict=True))
        have, want = outcome(operation, x, y), outcome(operation, *operands())
        found[name] = max(
            float((mine.double() - theirs.double()).abs().max())
            for one, other in zip(have, want, strict=True)
            for mine, theirs in zip(one, other, strict=True)
            if theirs is not None
        )
    return found


def values_read_on_ranks(rank: int, world: int) -> bool:
    """What needs the whole asks all ranks, and gives each the same."""
    mesh, whole = Mesh({"a": world}), torch.arange(12.0).reshape(6, 2)
    x = place(whole, mesh, P("a"))
    return (
        bool((x == whole).all())
        and float(x.sum()) == 66.0
        and x.tolist() == whole.tolist()
        and x[5].tolist() == [10.0, 11.0]
        and torch.equal(x, whole)
        and repr(x).startswith("MeshTensor([6, 2]")
    )


def caches_in_place(rank: int, world: int) -> bool:
    """Donated caches of two layers, split over the ranks: each rank writes into its own where it is."""

    def token(caches: list[torch.Tensor], x: torch.Tensor, at: torch.Tensor) -> Any:
        new = []
        for cache in caches:
            new.append(cache.index_copy(1, at, x[:, None]))
            x = (x + new[-1].sum(1)) % 5
        return new, x.sum()

    mesh, specs = Mesh({"tp": world}), [P("tp"), P("tp")]
    run = jit(
        shard(token, mesh, in_specs=(specs, P("tp"), P()), out_specs=(specs, P())),
        donate_argnums=0,
    )
    caches = [torch.zeros(2 * world, 8, 4) for _ in specs]
    x, right = torch.arange(8.0 * world).reshape(2 * world, 4) % 3, []
    placed = place([cache.clone() for cache in caches], mesh, specs)
    for at in map(torch.tensor, ([1], [2], [5])):
        caches, want = token(caches, x, at)
        before = [cache.local.data_ptr() for cache in placed]
        placed, have = run(placed, x, at)
        after = [cache.local.data_ptr() for cache in placed]
        right += [before == after, float(have) == float(want)]
        right += [torch.equal(one.full(), other) for one, other in zip(placed, caches, strict=True)]
    return all(right)


CHECKS: dict[str, Callable[[int, int], Any]] = {
    "caches_in_place": caches_in_place,
    "single_operations": single_operations,
    "values_read_on_ranks": values_read_on_ranks,
}
