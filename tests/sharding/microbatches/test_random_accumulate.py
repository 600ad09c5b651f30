"""Random programs, accumulated over a random dim of random inputs: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import optree
import pytest
import torch
from effort import examples
from microbatched import batch_of, sum_of

from torchard import AccumulateError, Mesh, MeshTensor, P, accumulate, shard
from torchard.testing import strategies as ts

COUNT = examples(ci=24, explore=2000)


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
