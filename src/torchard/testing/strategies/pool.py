"""The values of a program that is being drawn, and choices among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TypeVar

import torch

from torchard.sharding import Mesh

__all__ = ["IDS", "Pool"]

# Every id is 0, 1 or 2.
IDS = 3

Choice = TypeVar("Choice")
Fits = Callable[[torch.Tensor], bool]


class Pool:
    """Values by name, and a generator that chooses among them.

    The generator is Python's or hypothesis's. What it gives for its smallest numbers is the simplest, and
    a choice means the same when other steps are gone: inputs are counted from the first on, results of
    steps back from the latest.

    Attributes:
        rng: the generator.
        values: the values, inputs first.
        inputs: how many of them are inputs.
        dtype: the dtype of floating inputs.
        mesh: the mesh for which values may be constrained, or None.
    """

    def __init__(self, rng: Random, dtype: torch.dtype, mesh: Mesh | None) -> None:
        self.rng, self.dtype, self.mesh = rng, dtype, mesh
        self.values: dict[str, torch.Tensor] = {}
        self.inputs = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]

    def choice(self, options: Sequence[Choice]) -> Choice:
        """One of some options, the simplest of which is first."""
        return options[self.rng.randrange(len(options))]

    def some(self, options: Iterable[Choice], count: int) -> list[Choice]:
        """So many different ones of some options, in any order."""
        left = list(options)
        return [left.pop(self.rng.randrange(len(left))) for _ in range(count)]

    def flip(self) -> bool:
        return self.choice((False, True))

    def any(self, least: int = 0, most: int = 4, fits: Fits = lambda x: True) -> str | None:
        """A floating value of some rank that fits, the latest more likely than others."""
        return self._any(lambda x: x.is_floating_point() and least <= x.ndim <= most and fits(x))

    def ids(self) -> str | None:
        """Integers below `IDS`."""
        return "ids" if "ids" in self.values else None

    def _any(self, fits: Fits) -> str | None:
        names = list(self.values)
        in_order = names[: self.inputs] + names[: self.inputs - 1 : -1]
        found = [name for name in in_order if fits(self.values[name])]
        if not found:
            return None
        latest = max(found, key=names.index)
        return latest if self.flip() else self.choice(found)

    def dim(self, name: str) -> int:
        """A dim of a value, counted from either end."""
        rank = self.values[name].ndim
        return int(self.choice([*range(rank), *range(-rank, 0)]))

    def dims(self, name: str) -> list[int]:
        """At least one dim of a value."""
        rank = self.values[name].ndim
        chosen = self.some(range(rank), self.choice(range(1, rank + 1)))
        return [d - rank if self.flip() else d for d in chosen]
