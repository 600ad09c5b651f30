"""What a case consists of, and the bytes that collectives send, as torchard counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard import Mesh, random

__all__ = [
    *("CASES", "DP", "LOSS", "TP", "TWO", "Case", "Program", "Sent", "expert"),
    *("exchange", "gather", "halo", "ids", "reduce", "scatter", "values", "weights"),
]

DP = Mesh({"dp": 4}, virtual=True)
TP = Mesh({"tp": 4}, virtual=True)
TWO = Mesh({"dp": 2, "tp": 2}, virtual=True)


@dataclass(frozen=True)
class Sent:
    """What one collective sends: the bytes of a rank, in each of its calls."""

    bytes: float
    times: int = 1

    def __mul__(self, times: int) -> Sent:
        """The collective in each iteration of a loop."""
        return Sent(self.bytes, self.times * times)


def reduce(elements: float, ranks: int = 4, size: int = 4) -> Sent:
    """An all_reduce of as many elements as each rank has, of `size` bytes."""
    return Sent(2 * (ranks - 1) / ranks * elements * size)


def gather(elements: float, ranks: int = 4, size: int = 4) -> Sent:
    """An all_gather of which the result has as many elements."""
    return Sent((ranks - 1) / ranks * elements * size)


def scatter(elements: float, ranks: int = 4) -> Sent:
    """A psum_scatter of terms of as many elements."""
    return gather(elements, ranks)


def exchange(elements: float, ranks: int = 4) -> Sent:
    """An all_to_all of as many elements as each rank has."""
    return gather(elements, ranks)


def halo(elements: float) -> Sent:
    """As many elements sent to neighbours."""
    return Sent(4 * elements)


LOSS = reduce(1)
"""The sum of a mean over four ranks."""


@dataclass(frozen=True)
class Program:
    """A function for one device, its arguments, and their specs on a mesh."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh
    in_specs: Any
    out_specs: Any


@dataclass(frozen=True)
class Case:
    """A program and what an expert would send.

    Attributes:
        name: what the program computes.
        build: returns the program, with random arguments.
        sent: the expert's collectives, before any are merged.
        repeats: how many ranks an expert has compute the same, where that is how little is sent; 1 if
            all products are split.
    """

    name: str
    build: Callable[[], Program]
    sent: tuple[Sent, ...]
    repeats: float = 1.0

    def program(self) -> Program:
        """The program, with the same arguments in each call."""
        _Draws.number = 0
        return self.build()

    @property
    def bytes(self) -> int:
        return round(sum(s.bytes * s.times for s in self.sent))

    @property
    def collectives(self) -> int:
        return sum(s.times for s in self.sent)


CASES: list[Case] = []


def expert(
    name: str, sent: Sequence[Sent] = (), *, repeats: float = 1.0
) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Add a case to the table: what the function below builds, and what an expert sends for it."""

    def added(build: Callable[[], Program]) -> Callable[[], Program]:
        CASES.append(Case(name, build, tuple(sent), repeats))
        return build

    return added


class _Draws:
    """How many tensors of random numbers were drawn for a program."""

    number = 0

    @classmethod
    def key(cls) -> torch.Tensor:
        cls.number += 1
        return random.key(cls.number)


def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal random numbers, others in each call of a case."""
    return random.normal(_Draws.key(), shape) * scale


def ids(*shape: int, below: int) -> torch.Tensor:
    """Random integers from 0 on."""
    return random.randint(_Draws.key(), shape, 0, below)


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Parameters by name, of a size at which activations stay near 1."""
    return {name: values(*shape, scale=shape[-1] ** -0.5) for name, shape in shapes.items()}
