"""Bugs of distributed training that were published, each beside the code as it should be.

Hand-sharded code runs all ranks of a group in one process, as lists with one entry for each rank; a
collective is a function of such a list. The line that is wrong, or from which something is missing, ends
in ``# HERE``, in the wrong function and in the right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchard import random

Ranks = list[torch.Tensor]
F64 = torch.float64


@dataclass(frozen=True)
class Bug:
    """One bug: what is right, what was written, arguments, and where it was published."""

    name: str
    source: str
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def lines(self) -> set[int]:
        """The marked lines of both functions."""
        return {line for fn in (self.right, self.wrong) for line in _marked(fn)}


def _marked(fn: Callable[..., Any]) -> list[int]:
    lines, first = inspect.getsourcelines(fn)
    return [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# HERE")]


BUGS: list[Bug] = []


def bug(source: str, right: Callable[..., Any], *args: Any) -> Callable[[Any], Any]:
    """Enter the wrong version of a function."""

    def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
        BUGS.append(Bug(wrong.__name__, source, right, wrong, args))
        return wrong

    return enter


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape, dtype=F64)


def psum(values: Ranks) -> Ranks:
    total = torch.stack(values).sum(0)
    return [total for _ in values]


def shards(x: torch.Tensor, n: int, dim: int) -> Ranks:
    return list(x.chunk(n, dim))


# -- a tensor-parallel MLP ----------------------------------------------------------------------------

MLP = (draw(1, 6, 4), draw(2, 4, 8), draw(3, 8, 4), draw(4, 4))


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    hidden = [F.gelu(x @ w) for w in shards(up, 2, 1)]
    partial = [h @ w for h, w in zip(hidden, shards(down, 2, 0), strict=True)]
    return psum(partial)[0] + bias  # HERE


@bug("Megatron-LM, row-parallel linear: the reduction after it left out", mlp, *MLP)
def missing_all_reduce(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    hidden = [F.gelu(x @ w) for w in shards(up, 2, 1)]
    partial = [h @ w for h, w in zip(hidden, shards(down, 2, 0), strict=True)]
    return partial[0] + bias  # HERE


@bug(
    "Megatron-LM, row-parallel linear: the bias added on each rank, before the reduction", mlp, *MLP
)
def double_bias(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    hidden = [F.gelu(x @ w) for w in shards(up, 2, 1)]
    partial = [h @ w + bias for h, w in zip(hidden, shards(down, 2, 0), strict=True)]  # HERE
    return psum(partial)[0]


# -- two axes: reductions over the right one ----------------------------------------------------------


def row_parallel_on_two_axes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The batch over dp, the contraction over tp."""
    rows = []
    for batch in shards(x, 2, 0):
        partial = [a @ b for a, b in zip(shards(batch, 2, 1), shards(w, 2, 0), strict=True)]
        rows.append(partial[0] + partial[1])  # HERE
    return torch.cat(rows)


@bug("DeepSpeed, expert parallelism: reduced over the group of another axis", row_parallel_on_two_axes,
     draw(5, 4, 6), draw(6, 6, 3))  # fmt: skip
def wrong_axis(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    partial = [
        [a @ b for a, b in zip(shards(batch, 2, 1), shards(w, 2, 0), strict=True)]
        for batch in shards(x, 2, 0)
    ]
    over_dp = [a + b for a, b in zip(*partial, strict=True)]  # HERE
    return torch.cat(over_dp)


# -- data parallelism ---------------------------------------------------------------------------------

REGRESSION = (draw(7, 4), draw(8, 6, 4), draw(9, 6))


def squared_error(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x @ w - y) ** 2).mean()


def data_parallel_gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batches = zip(shards(x, 2, 0), shards(y, 2, 0), strict=True)
    gradients = [torch.func.grad(squared_error)(w, a, b) for a, b in batches]
    return psum(gradients)[0] / 2  # HERE


@bug(
    "Horovod and others: gradients summed over ranks and not averaged",
    data_parallel_gradient,
    *REGRESSION,
)
def gradient_times_world_size(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batches = zip(shards(x, 2, 0), shards(y, 2, 0), strict=True)
    gradients = [torch.func.grad(squared_error)(w, a, b) for a, b in batches]
    return psum(gradients)[0]  # HERE


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    parts = list(zip(shards(losses, 2, 0), shards(mask, 2, 0), strict=True))
    total = psum([(a * m).sum() for a, m in parts])[0]
    count = psum([m.sum() for _, m in parts])[0]
    return total / count  # HERE


@bug("transformers, gradient accumulation (2024): masked losses averaged per rank", masked_mean,
     draw(10, 6), torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=F64))  # fmt: skip
def masked_loss_averaged_per_rank(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    parts = zip(shards(losses, 2, 0), shards(mask, 2, 0), strict=True)
    means = [(a * m).sum() / m.sum() for a, m in parts]  # HERE
    return psum(means)[0] / 2


# -- random numbers -----------------------------------------------------------------------------------


def dropped_out(x: torch.Tensor) -> torch.Tensor:
    """A hidden dim over two ranks, whose masks are parts of one mask."""
    masks = shards(random.bernoulli(random.key(3), 0.5, x.shape), 2, 1)
    return torch.cat([a * m * 2 for a, m in zip(shards(x, 2, 1), masks, strict=True)], 1)  # HERE


@bug(
    "Megatron-LM, CudaRNGStatesTracker's reason: one seed on every rank",
    dropped_out,
    draw(11, 4, 16),
)
def same_mask_on_every_rank(x: torch.Tensor) -> torch.Tensor:
    mask = random.bernoulli(random.key(3), 0.5, (4, 8))  # HERE
    return torch.cat([a * mask * 2 for a in shards(x, 2, 1)], 1)


# -- sequences ----------------------------------------------------------------------------------------


def with_positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    n = x.shape[0] // 2
    ranks = shards(x, 2, 0)
    return torch.cat([a + table[torch.arange(n) + n * r] for r, a in enumerate(ranks)])  # HERE


@bug("long-context fine-tuning frameworks: positions counted from 0 on each rank", with_positions,
     draw(12, 8, 4), draw(13, 8, 4))  # fmt: skip
def wrong_positions(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    n = x.shape[0] // 2
    return torch.cat([a + table[torch.arange(n)] for a in shards(x, 2, 0)])  # HERE


QKV = (draw(14, 8, 4), draw(15, 8, 4), draw(16, 8, 4))


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Blocks of keys and values go round a ring of two."""
    rows = []
    for r, mine in enumerate(shards(q, 2, 0)):
        numerator, denominator = torch.zeros_like(mine), torch.zeros(mine.shape[0], 1, dtype=F64)
        for turn in range(2):
            keys, values = shards(k, 2, 0)[(r + turn) % 2], shards(v, 2, 0)[(r + turn) % 2]
            weights = (mine @ keys.mT / 2).exp()
            numerator = numerator + weights @ values  # HERE
            denominator = denominator + weights.sum(1, keepdim=True)
        rows.append(numerator / denominator)
    return torch.cat(rows)


@bug("ring attention implementations: values of the turn before", ring_attention, *QKV)
def stale_values_in_a_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = []
    for r, mine in enumerate(shards(q, 2, 0)):
        numerator, denominator = torch.zeros_like(mine), torch.zeros(mine.shape[0], 1, dtype=F64)
        stale = shards(v, 2, 0)[r]
        for turn in range(2):
            keys = shards(k, 2, 0)[(r + turn) % 2]
            weights = (mine @ keys.mT / 2).exp()
            numerator = numerator + weights @ stale  # HERE
            denominator = denominator + weights.sum(1, keepdim=True)
        rows.append(numerator / denominator)
    return torch.cat(rows)


# -- gradients by hand --------------------------------------------------------------------------------


def norm_weight_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Of a norm's weight, under sequence parallelism: each rank has the gradient of its rows."""
    rows = zip(shards(x, 2, 0), shards(g, 2, 0), strict=True)
    partial = [(F.layer_norm(a, (4,)) * b).sum(0) for a, b in rows]
    return torch.stack(partial).sum(0)  # HERE


@bug("Megatron-LM, sequence parallelism: gradients of norm weights not reduced", norm_weight_gradient,
     draw(17, 6, 4), draw(18, 6, 4))  # fmt: skip
def norm_weights_not_reduced(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    rows = zip(shards(x, 2, 0), shards(g, 2, 0), strict=True)
    partial = [(F.layer_norm(a, (4,)) * b).sum(0) for a, b in rows]
    return partial[0]  # HERE


TIED = (draw(19, 7, 4), torch.tensor([1, 5, 2, 0]))


def tied_loss(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(table[ids])  # HERE
    return F.cross_entropy(hidden @ table.mT, ids.roll(-1))


@bug(
    "torch.distributed.pipelining (pytorch#51931): one use's gradient of tied embeddings lost",
    tied_loss,
    *TIED,
)
def tied_gradient_lost(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(table.detach()[ids])  # HERE
    return F.cross_entropy(hidden @ table.mT, ids.roll(-1))


def accumulated(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(w)
    for a, b in zip(shards(x, 3, 0), shards(y, 3, 0), strict=True):
        total = total + torch.func.grad(squared_error)(w, a, b) / 3  # HERE
    return total


@bug(
    "gradient accumulation: the loss not divided by the number of microbatches",
    accumulated,
    *REGRESSION,
)
def accumulated_without_dividing(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(w)
    for a, b in zip(shards(x, 3, 0), shards(y, 3, 0), strict=True):
        total = total + torch.func.grad(squared_error)(w, a, b)  # HERE
    return total


# -- norms and vocabularies ---------------------------------------------------------------------------

NORM = (draw(20, 4, 8), draw(21, 8))


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The hidden dim over two ranks."""
    squares = psum([a.square().sum(-1, keepdim=True) for a in shards(x, 2, 1)])[0]
    scale = (squares / x.shape[1] + 1e-3).rsqrt()  # HERE
    return x * scale * weight


@bug("ports between frameworks: eps outside of the root", rms_norm, *NORM)
def eps_outside_the_root(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    squares = psum([a.square().sum(-1, keepdim=True) for a in shards(x, 2, 1)])[0]
    scale = 1 / ((squares / x.shape[1]).sqrt() + 1e-3)  # HERE
    return x * scale * weight


@bug("norms of a split hidden dim: statistics of a rank's own part", rms_norm, *NORM)
def statistics_of_one_rank(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    local = [a.square().sum(-1, keepdim=True) for a in shards(x, 2, 1)]
    scales = [(s / (x.shape[1] // 2) + 1e-3).rsqrt() for s in local]  # HERE
    return torch.cat([a * s for a, s in zip(shards(x, 2, 1), scales, strict=True)], 1) * weight


VOCABULARY = (draw(22, 8, 4), torch.tensor([0, 3, 4, 7]))


def vocabulary_parallel(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each of two ranks looks up the ids of its half, and gives zero for the others."""
    partial = []
    for r, rows in enumerate(shards(table, 2, 0)):
        first, last = 4 * r, 4 * (r + 1)
        outside = (ids < first) | (ids >= last)  # HERE
        found = rows[(ids - first).masked_fill(outside, 0)]
        partial.append(found.masked_fill(outside[:, None], 0.0))
    return psum(partial)[0]


@bug(
    "Megatron-LM's vocabulary mask: off by one at the end of a rank's range",
    vocabulary_parallel,
    *VOCABULARY,
)
def vocabulary_mask_off_by_one(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    partial = []
    for r, rows in enumerate(shards(table, 2, 0)):
        first, last = 4 * r, 4 * (r + 1)
        outside = (ids < first) | (ids >= last - 1)  # HERE
        found = rows[(ids - first).masked_fill(outside, 0)]
        partial.append(found.masked_fill(outside[:, None], 0.0))
    return psum(partial)[0]
