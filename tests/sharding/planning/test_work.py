"""What a plan reports of the work it splits, and the warning where it splits none."""

from __future__ import annotations

import warnings

import pytest
import torch
import work
from torch import Tensor

from torchard import IdleAxisWarning, Mesh, P, ShapeDtype, constrain, shard, shard_map, trace

MESH = Mesh({"dp": 2, "tp": 4}, virtual=True)
X, UP, DOWN = (ShapeDtype(shape) for shape in ((8, 16), (16, 32), (32, 16)))
PRODUCTS = 2 * (2 * 8 * 16 * 32)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


def test_two_axes_split_a_layer() -> None:
    program = shard(mlp, MESH, in_specs=(P("dp"), P(None, "tp"), P("tp"))).lower(X, UP, DOWN)
    assert program.work.flops == PRODUCTS + 8 * 32
    assert program.work.rank_flops == program.work.flops // 8
    assert [(a.axis, a.size, a.flops, a.bytes) for a in program.work.axes] == [
        ("dp", 2, 1.0, 1.0),
        ("tp", 4, 1.0, 1.0),
    ]
    busiest = max(rank.flops for rank in work.of_ranks(program, MESH))
    assert program.work.rank_flops == busiest + 8 * 32 // 8
    elements = (4 * 16 + 16 * 8 + 4 * 8) + 2 * (4 * 8) + (4 * 8 + 8 * 16 + 4 * 16)
    assert program.work.rank_bytes == 4 * elements
    assert str(program.work).splitlines()[2].split() == ["busiest", "rank", "8", "2,080", "2,048"]


def test_an_axis_that_splits_one_of_two_products() -> None:
    program = shard(mlp, MESH, in_specs=(P("dp"), P(), P(None, "tp"))).lower(X, UP, DOWN)
    _, tp = program.work.axes
    assert tp.flops == pytest.approx((PRODUCTS / 2) / (PRODUCTS + 8 * 32))


def test_one_device_has_no_axes() -> None:
    program = trace(mlp)(*(torch.ones(s.shape) for s in (X, UP, DOWN)))
    assert program.work.flops == program.work.rank_flops == PRODUCTS + 8 * 32
    assert program.work.axes == ()


LARGE = ShapeDtype((256, 256))
# Their product takes longer to gather than to compute.
TALL, WIDE = ShapeDtype((2048, 8)), ShapeDtype((8, 2048))


def test_an_axis_that_splits_nothing_is_warned_of_once() -> None:
    """What is gathered by a constraint is used whole, by every rank."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return constrain(constrain(x, P()) @ w, P())

    run = shard(fn, Mesh({"tp": 4}, virtual=True), in_specs=(P("tp"), P()), out_specs=P())
    with pytest.warns(IdleAxisWarning, match=r"fn: axis 'tp' splits 0.0% of the products"):
        run.lower(TALL, WIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.lower(ShapeDtype((4096, 8)), WIDE)


def test_no_warning_of_products_of_each_rank() -> None:
    mesh = Mesh({"tp": 4}, virtual=True)
    run = shard_map(lambda w: w @ w, mesh, in_specs=P("tp"), out_specs=P("tp"))
    run.lower(ShapeDtype((4 * 256, 256)))


def test_no_warning_where_the_work_is_split_or_nothing_was_asked_for() -> None:
    for spec in (P("tp"), P(None, "tp"), P()):
        run = shard(lambda x, w: x @ w, Mesh({"tp": 4}, virtual=True), in_specs=(spec, P()))
        run.lower(LARGE, LARGE)
