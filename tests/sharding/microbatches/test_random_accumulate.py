"""Random programs, accumulated over a random dim of random inputs: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import optree
import pytest
import torch
from effort import examples

from torchard import AccumulateError, Mesh, MeshTensor, P, accumulate, shard
from torchard.testing import strategies as ts

F64 = torch.float64
COUNT = examples(ci=40, explore=2000)


def sum_of(program: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """A number that depends on all floating results."""
    floats = [v for v in optree.tree_leaves(program(*inputs)) if v.is_floating_point()]
    return sum(((v * v + v).sum(dtype=F64) for v in floats), torch.zeros((), dtype=F64))


def batch_of(inputs: tuple[torch.Tensor, ...], draw: Random) -> tuple[int, tuple[int | None, ...]] | None:
    """The number of slices, and the dim of some inputs that have the same size there."""
    arrays = [(i, x) for i, x in enumerate(inputs) if x.dtype != torch.int64 or x.shape != (2,)]  # no key
    dims = [(i, d, n) for i, x in arrays for d, n in enumerate(x.shape) if n > 1]
    if not dims:
        return None
    _, _, size = draw.choice(dims)
    batch: list[int | None] = [None] * len(inputs)
    for i, d, n in draw.sample(dims, len(dims)):
        if n == size and (draw.random() < 0.7 or batch == [None] * len(inputs)):
            batch[i] = d
    return draw.choice([k for k in range(2, size + 1) if size % k == 0]), tuple(batch)


def whole(tree: Any) -> Any:
    return optree.tree_map(lambda v: v.full() if isinstance(v, MeshTensor) else v, tree)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*along no value")
def test_random_programs() -> None:
    right = [sum(_is_right(seed) for seed in range(start, COUNT, 4)) for start in range(4)]
    assert sum(right) > COUNT // 4, right  # most of the others need the whole batch


def _is_right(seed: int) -> bool:
    """Whether the program is right; False if torch or accumulate refuses it.

    Raises:
        AssertionError: it is wrong.
    """
    program, draw = ts.random_program(seed, steps=6), Random(seed)
    inputs, chosen = program.inputs, batch_of(program.inputs, draw)
    if chosen is None:
        return False
    steps, batch = chosen
    floats = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return sum_of(program, *values) + 0 * sum(values[i].sum() for i in floats)

    def split(fn: Callable[..., Any]) -> Any:
        return accumulate(fn, steps, batch=batch)

    mesh = Mesh({"dp": 2}, virtual=True)
    ways: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (program.function, split(program.function)),
        (torch.func.grad(loss, floats), split(torch.func.grad(loss, floats))),
        (torch.func.grad(loss, floats), torch.func.grad(split(loss), floats)),
        (program.function, shard(split(program.function), mesh, out_specs=P())),
    ]
    plain, run = ways[seed % 4]
    try:
        want = plain(*inputs)
    except RuntimeError:
        return False
    try:
        have = whole(run(*inputs))
    except AccumulateError:
        return False
    try:
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-8, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {steps} slices, batch={batch}\n{program}\n{error}") from None
    return True
