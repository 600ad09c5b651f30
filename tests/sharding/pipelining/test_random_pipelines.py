"""Random programs, cut anywhere, by any schedule: right, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import optree
import pytest
import torch
from effort import examples
from microbatched import batch_of, sum_of
from pipelined import whole

from torchard import (
    AccumulateError,
    Mesh,
    MeshTensor,
    P,
    PipelineError,
    checkpoint,
    jit,
    pipeline,
    place,
    stage_specs,
)
from torchard.sharding.pipelining.schedules import SCHEDULES
from torchard.testing import strategies as ts

COUNT = examples(ci=16, explore=2000)
AXES: tuple[dict[str, int], ...] = ({}, {}, {"dp": 2}, {"tp": 3})

Fn = Callable[..., Any]


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*along no value")
@pytest.mark.filterwarnings("ignore::torchard.IdleAxisWarning")
def test_random_programs() -> None:
    found = Counter(map(outcome, range(COUNT)))
    print(f"of {COUNT} programs: {dict(found)}")
    assert found["right"] > COUNT // 3, found  # most of the others need the whole batch, or are too short


def outcome(seed: int) -> str:
    """Whether the program is right, torch cannot run it, or what refuses it.

    Raises:
        AssertionError: it is wrong.
    """
    program, draw = ts.random_program(seed, steps=8), Random(seed)
    inputs = program.inputs
    floats = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return sum_of(program, *values) + 0 * sum(values[i].sum() for i in floats)

    chosen = batch_of(inputs, draw) if draw.random() < 0.8 else None
    count, batch = chosen or (1, None)
    schedule, ranks = draw.choice(SCHEDULES), draw.choice((1, 2, 2, 3))
    mesh = Mesh({"pp": ranks, **draw.choice(AXES)}, virtual=True)

    def cut(fn: Fn) -> Any:
        return pipeline(fn, mesh, "pp", microbatches=count, batch=batch, schedule=schedule)

    plain, run = draw.choice(
        [
            (program.function, cut(program.function)),
            (loss, jit(cut(loss), backend="eager")),
            (torch.func.grad_and_value(loss, floats), cut(torch.func.grad_and_value(loss, floats))),
            (torch.func.grad(loss, floats), torch.func.grad(cut(loss), floats)),
            (torch.func.grad(loss, floats), cut(torch.func.grad(checkpoint(loss), floats))),
            (tangent(loss, floats), tangent(cut(loss), floats)),
            (tangent(loss, floats), cut(tangent(loss, floats))),
            (product(loss, floats), product(cut(loss), floats)),
        ]
    )
    try:
        want = plain(*inputs)
    except RuntimeError:
        return "refused by torch"
    try:
        have = run(*placed(run, inputs, mesh, draw))
        if hasattr(run, "lower"):
            str(run.lower(*inputs).schedule)
    except (AccumulateError, PipelineError) as error:
        return f"refused by {type(error).__name__}"
    try:
        torch.testing.assert_close(whole(have), want, rtol=1e-8, atol=1e-8, equal_nan=True)
    except AssertionError as error:
        how = f"{mesh}, {schedule}, {count} microbatches, batch={batch}"
        raise AssertionError(f"seed {seed}: {how}\n{program}\n{error}") from None
    return "right"


def placed(run: Any, inputs: tuple[Any, ...], mesh: Mesh, draw: Random) -> tuple[Any, ...]:
    """The inputs, some of them placed: the first where it is used, others at a stage or split."""
    if draw.random() < 0.4:
        return inputs
    other = next((axis for axis in mesh.axes if axis != "pp"), None)
    values = list(inputs)
    for i, x in enumerate(inputs):
        if x.is_floating_point() and draw.random() < 0.5:
            split = P(other) if other and x.ndim and draw.random() < 0.5 else P()
            at = split.at(pp=draw.randrange(mesh.shape["pp"])) if draw.random() < 0.7 else split
            values[i] = place(x, mesh, at)
    if hasattr(run, "lower") and draw.random() < 0.5 and not isinstance(values[0], MeshTensor):
        values[0] = place(values[0], mesh, stage_specs(run, *values))
    return tuple(values)


def tangent(fn: Fn, at: tuple[int, ...]) -> Fn:
    """The directional derivative, along the values themselves."""

    def jvp(*values: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            given = dict(zip(at, floats, strict=True))
            return fn(*(given.get(i, v) for i, v in enumerate(values)))

        floats = tuple(values[i] for i in at)
        return torch.func.jvp(of_floats, floats, floats)

    return jvp


def product(fn: Fn, at: tuple[int, ...]) -> Fn:
    """The product of the Hessian and the values."""
    return tangent(lambda *values: optree.tree_map(torch.sum, torch.func.grad(fn, at)(*values)), at)
