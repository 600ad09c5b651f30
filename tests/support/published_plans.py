"""Published bugs as plans: the plan of the right function by `shard`, broken in the way of the bug.

Each is under its name in `published_bugs`. What is left out is in `NO_PLANS`, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from broken_plans import (
    Broken,
    bias_before_the_sum,
    break_one,
    drop_a_step,
    other_axis,
    reduced_twice,
)
from broken_rules import broken
from published_bugs import F64, MLP, NORM, REGRESSION, TIED, draw, squared_error, tied_loss

from torchard import Mesh, P, random, shard
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import STEP

__all__ = ["NO_PLANS", "PLANS", "Published"]

TP = Mesh({"tp": 2}, virtual=True)
DP = Mesh({"dp": 2}, virtual=True)


@dataclass(frozen=True)
class Published:
    """A plan as it should be, and with a bug.

    Attributes:
        right: the plan.
        wrong: a context with the plan with the bug, and the node where it is.
    """

    right: Callable[[], Program]
    wrong: Callable[[], contextlib.AbstractContextManager[Broken]]


NO_PLANS = {
    "stale_values_in_a_ring": "the ring is written in a shard_map, whose collectives a proof assumes",
    "accumulated_without_dividing": "the function itself is another one; on one rank, too",
    "eps_outside_the_root": "the function itself is another one; on one rank, too",
    "vocabulary_mask_off_by_one": "a mask is local code of an emitter, which a proof takes for granted",
}


def lowered(fn: Callable[..., Any], mesh: Mesh, specs: Any, args: Any, out: Any = None) -> Program:
    return shard(fn, mesh, specs, out or P()).lower(*args)


Right = Callable[[], Program]
Wrong = Callable[[Right], Iterator[Broken]]
PLANS: dict[str, Published] = {}


def published(name: str, right: Right, wrong: Wrong) -> None:
    PLANS[name] = Published(right, functools.partial(contextlib.contextmanager(wrong), right))


def at(change: Callable[[Any], bool], mesh: Mesh, which: int = 0) -> Wrong:
    """A change at one of a plan's reductions."""

    def wrong(right: Right) -> Iterator[Broken]:
        plan = right()
        reductions = [n for n in plan.calls if STEP.on(n) and STEP.of(n).kind == "all_reduce"]
        yield break_one(change, plan, reductions[which], mesh)

    return wrong


def without_offsets(target: Any) -> Wrong:
    """What an operation makes is on every rank the first part, as if its rule said to run it as it is."""

    def wrong(right: Right) -> Iterator[Broken]:
        with broken(target, None, seed=0):
            plan = right()
            (node,) = [n for n in plan.calls if n.target is target]
            yield Broken("without_offsets", node.name, plan)

    return wrong


# -- a tensor-parallel MLP ----------------------------------------------------------------------------


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ up) @ down + bias


megatron = functools.partial(lowered, mlp, TP, (P(), P(None, "tp"), P("tp"), P()), MLP)
published("missing_all_reduce", megatron, at(drop_a_step, TP))
published("double_bias", megatron, at(bias_before_the_sum, TP))


# -- two axes -----------------------------------------------------------------------------------------

GRID = Mesh({"dp": 2, "tp": 2}, virtual=True)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


rows = functools.partial(
    lowered, product, GRID, (P("dp", "tp"), P("tp")), (draw(5, 4, 6), draw(6, 6, 3)), P("dp")
)
published("wrong_axis", rows, at(other_axis, GRID))


# -- data parallelism ---------------------------------------------------------------------------------

data = functools.partial(
    lowered, torch.func.grad(squared_error), DP, (P(), P("dp"), P("dp")), REGRESSION
)
published("gradient_times_world_size", data, at(reduced_twice, DP, -1))


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum() / mask.sum()


masked = functools.partial(
    lowered, masked_mean, DP, (P("dp"), P("dp")), (draw(10, 6), torch.ones(6, dtype=F64))
)
published("masked_loss_averaged_per_rank", masked, at(drop_a_step, DP))


# -- random numbers and positions ---------------------------------------------------------------------


def dropped_out(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * random.bernoulli(key, 0.5, x.shape) * 2


def with_positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x + table[torch.arange(x.shape[0])]


SPLIT = P(None, "tp")
masks = functools.partial(
    lowered, dropped_out, TP, (P(), SPLIT), (random.key(3), draw(11, 4, 16)), SPLIT
)
BITS = torch.ops.torchard.random_bits.default
published("same_mask_on_every_rank", masks, without_offsets(BITS))

positions = functools.partial(
    lowered, with_positions, TP, (P("tp"), P()), (draw(12, 8, 4), draw(13, 8, 4)), P("tp")
)
ARANGE = torch.ops.aten.arange.default
published("wrong_positions", positions, without_offsets(ARANGE))


# -- gradients and norms ------------------------------------------------------------------------------


def weighted(weight: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return (F.layer_norm(x, (4,), weight) * g).sum()


norm = functools.partial(
    lowered, torch.func.grad(weighted), TP, (P(), P("tp"), P("tp")),
    (draw(16, 4), draw(17, 6, 4), draw(18, 6, 4)),
)  # fmt: skip
published("norm_weights_not_reduced", norm, at(drop_a_step, TP, -1))

tied = functools.partial(lowered, torch.func.grad(tied_loss), DP, (P(), P("dp")), TIED)
published("tied_gradient_lost", tied, at(drop_a_step, DP, -1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight


split_norm = functools.partial(lowered, rms_norm, TP, (P(None, "tp"), P("tp")), NORM, P(None, "tp"))
published("statistics_of_one_rank", split_norm, at(drop_a_step, TP))
