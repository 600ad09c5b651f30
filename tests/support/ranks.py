"""What shard_map means, in plain torch: every rank runs the function on its own shard, in a thread.

``run`` is the reference: collectives exchange lists of tensors, so autograd differentiates the whole as
one function, and knows nothing of what varies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard import P

Coords = dict[str, int]


class Ranks:
    """The collectives as one rank sees them."""

    def __init__(self, axes: dict[str, int], at: Coords, slots: dict[Any, Any], barrier: Any) -> None:
        self.axes, self.at, self.slots, self.barrier = axes, at, slots, barrier

    def members(self, over: Any, x: Any) -> tuple[list[Any], int]:
        """Everybody's value along these axes, and this rank's position among them."""
        names = (over,) if isinstance(over, str) else over
        self.slots[tuple(self.at.values())] = x
        self.barrier.wait()
        places = [
            {**self.at, **dict(zip(names, index, strict=True))}
            for index in itertools.product(*(range(self.axes[a]) for a in names))
        ]
        found = [self.slots[tuple(place.values())] for place in places]
        self.barrier.wait()
        return found, places.index(self.at)

    def psum(self, x: Any, over: Any) -> Any:
        return sum(self.members(over, x)[0])

    def pmean(self, x: Any, over: Any) -> Any:
        return self.psum(x, over) / self.axis_size(over)

    def pmax(self, x: Any, over: Any) -> Any:
        return torch.stack(self.members(over, x)[0]).amax(0)

    def pmin(self, x: Any, over: Any) -> Any:
        return torch.stack(self.members(over, x)[0]).amin(0)

    def pvary(self, x: Any, over: Any) -> Any:
        return x

    def all_gather(
        self, x: Any, over: Any, dim: int = 0, tiled: bool = False, invariant: bool = False
    ) -> Any:
        return (torch.cat if tiled else torch.stack)(self.members(over, x)[0], dim)

    def psum_scatter(self, x: Any, over: Any, dim: int = 0, tiled: bool = False) -> Any:
        found, i = self.members(over, x)
        part = sum(found).chunk(len(found), dim)[i]
        return part if tiled else part.squeeze(dim)

    def all_to_all(
        self, x: Any, over: Any, split_dim: int, concat_dim: int, tiled: bool = False
    ) -> Any:
        found, i = self.members(over, x)
        if not tiled:
            return torch.stack([y.select(split_dim, i) for y in found], concat_dim)
        return torch.cat([y.chunk(len(found), split_dim)[i] for y in found], concat_dim)

    def ppermute(self, x: Any, over: Any, perm: Sequence[tuple[int, int]]) -> Any:
        found, i = self.members(over, x)
        return next((found[s] for s, t in perm if t == i), torch.zeros_like(x))

    def axis_index(self, over: Any) -> Any:
        return torch.tensor(self.members(over, None)[1])

    def axis_size(self, over: Any) -> int:
        return len(self.members(over, None)[0])


def splits(spec: P) -> list[tuple[str, int]]:
    """Each axis of a spec with the dim it splits, outermost first."""
    entries = [(e,) if isinstance(e, str) else e or () for e in spec.entries]
    return [(a, dim) for dim, entry in enumerate(entries) for a in entry]


def pieces(x: torch.Tensor, spec: P, axes: dict[str, int], at: Coords) -> torch.Tensor:
    """One rank's shard."""
    for a, dim in splits(spec):
        x = x.chunk(axes[a], dim)[at[a]]
    return x


def joined(parts: dict[tuple[int, ...], Any], spec: P, axes: dict[str, int]) -> Any:
    """The global value of the ranks' results: of what is replicated, the first rank's."""
    for a, dim in reversed(splits(spec)):
        i, merged = list(axes).index(a), {}
        for at in parts:
            if at[i] == 0:
                run = [parts[(*at[:i], n, *at[i + 1 :])] for n in range(axes[a])]
                merged[at] = torch.cat(run, dim)
        parts = merged
    return next(iter(parts.values()))


def run(
    fn: Callable[..., Any], axes: dict[str, int], in_specs: Sequence[P], out_spec: P, *args: Any
) -> Any:
    """``shard_map(fn)(*args)``, where fn takes its collectives as first argument."""
    found: dict[tuple[int, ...], Any] = {}
    slots: dict[Any, Any] = {}
    places = [dict(zip(axes, i, strict=True)) for i in itertools.product(*map(range, axes.values()))]
    barrier = threading.Barrier(len(places))

    def rank(at: Coords) -> None:
        local = [pieces(x, s, axes, at) for x, s in zip(args, in_specs, strict=True)]
        try:
            found[tuple(at.values())] = fn(Ranks(axes, at, slots, barrier), *local)
        except BaseException as error:
            slots["error"] = error
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(at,)) for at in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "error" in slots:
        raise slots["error"]
    return joined({key: found[key] for key in sorted(found)}, out_spec, axes)


def rotation(c: Any, axes: Any) -> list[tuple[int, int]]:
    n = c.axis_size(axes)
    return [(i, (i + 1) % n) for i in range(n - 1)]  # the last rank sends nothing: zeros arrive


# By name: the function of a [2m, 2n]-or-larger shard and a [1, 1] weight, and whether what it gives
# still varies over the axes. Every dim divides by the number of ranks.
COLLECTIVES: dict[str, tuple[Callable[..., Any], bool]] = {
    "psum": (lambda c, a, x, w: c.psum(x, a), False),
    "pmean": (lambda c, a, x, w: c.pmean(x, a), False),
    "pmax": (lambda c, a, x, w: c.pmax(x.detach(), a) + c.psum(x, a), False),
    "pmin": (lambda c, a, x, w: c.pmin(x.detach(), a) + c.psum(x, a), False),
    "pvary": (lambda c, a, x, w: c.pvary(w, a) * x, True),
    "all_gather": (lambda c, a, x, w: c.all_gather(x, a)[0] * x, True),
    "all_gather 1": (lambda c, a, x, w: c.all_gather(x, a, dim=1).sum(1) * x, True),
    "all_gather tiled": (lambda c, a, x, w: c.all_gather(x, a, dim=1, tiled=True), True),
    "all_gather invariant": (
        lambda c, a, x, w: c.all_gather(x, a, dim=1, tiled=True, invariant=True).cos() * w,
        False,
    ),
    "psum_scatter tiled": (lambda c, a, x, w: c.psum_scatter(x, a, dim=1, tiled=True), True),
    "psum_scatter": (
        lambda c, a, x, w: c.psum_scatter(x.unflatten(0, (c.axis_size(a), -1)), a),
        True,
    ),
    "all_to_all tiled": (
        lambda c, a, x, w: c.all_to_all(x, a, split_dim=1, concat_dim=0, tiled=True),
        True,
    ),
    "all_to_all one dim": (
        lambda c, a, x, w: c.all_to_all(x, a, split_dim=0, concat_dim=0, tiled=True) * x,
        True,
    ),
    "all_to_all": (
        lambda c, a, x, w: c.all_to_all(
            x.unflatten(1, (c.axis_size(a), -1)), a, split_dim=1, concat_dim=2
        ),
        True,
    ),
    "ppermute": (lambda c, a, x, w: c.ppermute(x, a, rotation(c, a)) * x, True),
    "axis_index": (lambda c, a, x, w: x * (c.axis_index(a) + 1), True),
    "none": (lambda c, a, x, w: x.cumsum(0), True),
}
