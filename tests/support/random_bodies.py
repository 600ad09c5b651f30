"""Random bodies of scans, for what runs their iterations in native code.

A body has carries and rows of all kinds of layouts (transposed, expanded, a slice of something larger),
products that torch's own kernels compute and products that are small, carries that change places, and
results that are views, constants, or what came in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Body", "random_body"]

SIZES = (3, 8, 24)


@dataclass
class Body:
    """A scan, and the plain loop that it equals.

    Attributes:
        arguments: weights, carries and rows; those of floating point may be differentiated.
        step: from weights, carries and rows of a step to the next carries and what is stacked.
    """

    seed: int
    weights: list[Tensor]
    carries: list[Tensor]
    rows: list[Tensor]
    step: Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
    reverse: bool

    def unrolled(
        self, weights: list[Tensor], carries: list[Tensor], rows: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The loop in Python."""
        count, stacked = len(rows[0]), list[list[Tensor]]()
        order = reversed(range(count)) if self.reverse else range(count)
        for i in order:
            carries, results = self.step(weights, carries, [row[i] for row in rows])
            stacked.append(results)
        if self.reverse:
            stacked.reverse()
        return carries, [torch.stack(each) for each in zip(*stacked, strict=True)]


def random_body(seed: int, steps: int, dtype: torch.dtype = torch.float32) -> Body:
    """A body of 2 to 6 operations on up to three carries and two kinds of rows."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / 2

    n = draw.choice(SIZES)
    layouts: list[Callable[[], Tensor]] = [
        lambda: values(n, n),
        lambda: values(n, n).t(),
        lambda: values(n, 1).expand(n, n),
        lambda: values(n, 2 * n)[:, ::2],
        lambda: torch.zeros(n, n, dtype=dtype),
    ]
    of_rows: list[Callable[[], Tensor]] = [
        lambda: values(steps, n, n),
        lambda: values(n, steps, n).movedim(1, 0),
        lambda: values(steps, n, n).mT,
        lambda: values(1, n, n).expand(steps, n, n),
        lambda: values(2 * steps, n, n)[::2],
    ]
    weights = [draw.choice(layouts)() for _ in range(draw.randint(1, 2))]
    carries = [draw.choice(layouts)() for _ in range(draw.randint(1, 3))]
    rows = [draw.choice(of_rows)() for _ in range(draw.randint(1, 2))]
    unary: list[Callable[[Tensor], Tensor]] = [
        torch.tanh, torch.sin, lambda x: x.t(), lambda x: x.softmax(-1), lambda x: x.flip(0),
        lambda x: x - x.mean(0, keepdim=True), lambda x: x[:1].expand(n, n), lambda x: x.cumsum(1) / n,
    ]  # fmt: skip
    binary: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x @ y / n,
        lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.addmm(x, x, y) / n,
        lambda x, y: (x.reshape(1, n, n) @ y.reshape(1, n, n)).reshape(n, n) / n,
    ]  # fmt: skip
    plan: list[tuple[Any, int, int]] = []
    known = len(weights) + len(carries) + len(rows)
    for _ in range(draw.randint(2, 6)):
        function = draw.choice(draw.choice([unary, binary, binary]))
        plan.append((function, draw.randrange(known), draw.randrange(known)))
        known += 1
    first = len(weights)
    ends = [draw.randrange(first, known) for _ in carries]
    stacked = [draw.randrange(first, known) for _ in range(draw.randint(1, 2))]

    def step(
        weights: list[Tensor], carries: list[Tensor], rows: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        values = [*weights, *carries, *rows]
        for function, i, j in plan:
            values.append(function(values[i]) if function in unary else function(values[i], values[j]))
        return [values[i] for i in ends], [values[i] for i in stacked]

    return Body(seed, weights, carries, rows, step, draw.random() < 0.3)
