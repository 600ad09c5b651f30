"""Random programs of the supported operations, as a hypothesis strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from operations import F64, IDS, MAKERS, Made, Pool, binary, linear, matmul, unary

from torchard.functional import random
from torchard.sharding import Mesh, P
from torchard.sharding.testing import meshes, random_spec


@dataclass
class Example:
    """A program, its inputs and where they live."""

    mesh: Mesh
    lines: list[str]
    steps: list[Callable[[list[torch.Tensor]], torch.Tensor]]
    inputs: tuple[torch.Tensor, ...]
    results: tuple[int, ...]
    in_specs: tuple[P, ...]
    out_specs: tuple[P | None, ...]
    placed: bool

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for step in self.steps:
            values.append(step(values))
        return tuple(values[i] for i in self.results)

    def loss(self, *inputs: torch.Tensor) -> torch.Tensor:
        """One number of all results."""
        return sum((out * out.detach().sign()).sum() for out in self(*inputs))  # type: ignore[return-value]

    def gradients(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of the loss, for every floating input: a function with grad inside."""
        floating = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
        found: tuple[torch.Tensor, ...] = torch.func.grad(self.loss, floating)(*inputs)
        return found

    def __repr__(self) -> str:
        given = [
            f"  v{i} = {list(x.shape)} {x.dtype} {spec}"
            for i, (x, spec) in enumerate(zip(self.inputs, self.in_specs, strict=True))
        ]
        n = len(self.inputs)
        body = [f"  v{n + i} = {line}" for i, line in enumerate(self.lines)]
        results = zip(self.results, self.out_specs, strict=True)
        ends = [f"  return v{i} as {spec}" for i, spec in results]
        head = f"{self.mesh}, {'placed' if self.placed else 'plain'}:"
        return "\n".join([head, *given, *body, *ends])


_SIZES = [1, 2, 3, 4, 5, 6]


def programs(most: int = 8) -> st.SearchStrategy[Example]:
    """Programs over a key, floating inputs and ids.

    A program is made by a seed, its length alone is hypothesis's: a shorter one is a prefix of it.
    """
    return st.builds(
        _program, st.integers(0, 2**32 - 1), meshes(), st.sampled_from(range(1, most + 1))
    )


def _program(seed: int, mesh: Mesh, length: int) -> Example:
    rng = Random(seed)
    pool = Pool(rng, mesh)
    inputs = _inputs(rng)
    values = list(inputs)
    pool.values = [x.to("meta") for x in inputs]
    makers = [*MAKERS, unary, unary, binary, binary, matmul, linear]
    lines: list[str] = []
    steps: list[Callable[[list[torch.Tensor]], torch.Tensor]] = []
    for _ in range(4 * length):
        if len(lines) == length:
            break
        made = rng.choice(makers)(pool)
        value = None if made is None else _value_of(made, values)
        if made is None or value is None or value.numel() > 2000 or value.ndim > 4:
            continue
        values.append(value)
        pool.values.append(value.to("meta"))
        lines.append(made[0])
        steps.append(made[1])
    floating = [i for i, v in enumerate(pool.values) if v.is_floating_point()]
    results = (floating[-1], rng.choice(floating))[: rng.randint(1, 2)]
    shapes = [x.shape for x in inputs]
    in_specs = tuple(
        random_spec(rng, s, mesh, fused=True) if i else P() for i, s in enumerate(shapes)
    )
    out_specs = tuple(
        random_spec(rng, pool.values[i].shape, mesh) if pool.flip() else None for i in results
    )
    placed = pool.flip()
    return Example(mesh, lines, steps, tuple(inputs), results, in_specs, out_specs, placed)


def _inputs(rng: Random) -> list[torch.Tensor]:
    """A key, floating inputs whose dims often agree, and ids."""
    sizes = rng.sample(_SIZES, 3)
    generator = torch.Generator().manual_seed(rng.randint(0, 1000))
    shapes = [
        rng.choices(sizes, k=rng.choice([0, 1, 2, 2, 2, 3, 3])) for _ in range(rng.randint(2, 4))
    ]
    ids = rng.choices(sizes, k=rng.randint(0, 2))
    while ids == [2]:  # a key's shape
        ids = rng.choices(sizes, k=2)
    floating = [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
    return [random.key(7), *floating, torch.randint(0, IDS, ids, generator=generator)]


def _value_of(made: Made, values: list[torch.Tensor]) -> torch.Tensor | None:
    """What a step gives; None if that is an error or no finite number."""
    try:
        out = made[1](values)
    except (RuntimeError, IndexError):
        return None
    good = bool(out.isfinite().all()) and float(out.abs().max() if out.numel() else 0) < 1e4
    return out.detach() if good else None
