"""What tests of decoding share: small decoders, ways to run them, and a look at where caches lie."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from new_memory import allocations, mapped, parts_of, written
from paths import BENCHMARKS
from torch import Tensor

from torchard import tree

sys.path.append(str(BENCHMARKS))

import decoders
from decoders import Size, Step

__all__ = ["SIZE", "TOKENS", "WAYS", "Copies", "copies", "decoded", "decoders", "in_place"]

SIZE = Size(layers=2, width=64, heads=4, length=1024, vocab=32)
TOKENS = 6
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "planned": {"backend": "eager", "memory": "planned"},
    "compiled": {},
}


def decoded(run: Step, params: Any, caches: Any) -> tuple[Tensor, list[Tensor]]:
    """The tokens, and the caches after them."""
    with torch.no_grad():
        found, caches = decoders.decode(run, params, caches, TOKENS)
    return found, tree.leaves(caches)


class Copies(NamedTuple):
    """What a step does to caches that it is given.

    Attributes:
        moved: how many are returned elsewhere than given.
        new: the sizes of what is allocated that is as large as a cache.
        pages: of each cache, how many pages are written. A token's keys take one for each head.
    """

    moved: int
    new: list[int]
    pages: list[int]


def copies(run: Step, params: Any, empty: Callable[[], Any]) -> Copies:
    """Of a later step, with caches that nothing else holds.

    Args:
        empty: makes caches.
    """
    token, position = torch.tensor([1]), torch.tensor([SIZE.length // 2])
    held = [empty()]

    def step() -> None:
        held[0] = run(params, held[0], token, position)[1]

    with torch.no_grad():
        for _ in range(3):  # compiles; in planned memory, results find their places
            step()
        least = min(part.nbytes for part in parts_of(held[0]))
        new = allocations(step, least)
        held[0] = mapped(empty())
        places = [(part.data_ptr(), part.nbytes) for part in parts_of(held[0])]
        step()
    returned = [part.data_ptr() for part in parts_of(held[0])]
    moved = sum(here != there for (here, _), there in zip(places, returned, strict=True))
    return Copies(moved, new, [written(*place) for place in places])


def in_place(ranks: int = 1) -> Copies:
    """What a step does that writes a token's keys and values into the caches; of one rank."""
    return Copies(0, [], [SIZE.heads // ranks] * 2 * SIZE.layers)
