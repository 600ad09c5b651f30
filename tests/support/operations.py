"""What a random program is made of: ways to make one more value out of those there are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from torchard.functional import nn, random
from torchard.sharding import Mesh, constrain
from torchard.sharding.testing import random_spec

F64 = torch.float64
Made = tuple[str, Callable[[list[torch.Tensor]], torch.Tensor]]


class Pool:
    """The values so far, as meta tensors, and what to choose of them."""

    def __init__(self, rng: Random, mesh: Mesh) -> None:
        self.rng, self.mesh = rng, mesh
        self.values: list[torch.Tensor] = []

    def flip(self) -> bool:
        return self.rng.random() < 0.5

    def any(self, least: int = 0, most: int = 4, where: Any = None) -> int | None:
        """The index of a floating value, the latest more likely than others."""
        found = [
            i
            for i, v in enumerate(self.values)
            if v.is_floating_point() and least <= v.ndim <= most and (where is None or where(v))
        ]
        if not found:
            return None
        return found[-1] if self.flip() else self.rng.choice(found)

    def ids(self, rank: int | None = None) -> int | None:
        """Integer values below IDS."""
        found = [
            i
            for i, v in enumerate(self.values)
            if v.dtype == torch.int64 and v.shape != (2,) and (rank is None or v.ndim == rank)
        ]
        return self.rng.choice(found) if found else None

    def dim(self, i: int) -> int:
        rank = self.values[i].ndim
        return self.rng.randint(*(-rank, rank - 1))

    def dims(self, i: int) -> list[int]:
        rank = self.values[i].ndim
        some = self.rng.sample(range(rank), self.rng.randint(1, rank))
        return [d - rank if self.flip() else d for d in some]


IDS = 3  # every id is 0, 1 or 2
MAKERS: list[Callable[[Pool], Made | None]] = []


def maker(fn: Callable[[Pool], Made | None]) -> Callable[[Pool], Made | None]:
    MAKERS.append(fn)
    return fn


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "relu": torch.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "square": torch.square,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "plus one": lambda x: x + 1,
    "halved": lambda x: x / 2,
    "masked": lambda x: x.masked_fill(x > 0.3, 0.0),
    "like": lambda x: x * torch.ones_like(x) + torch.zeros_like(x),
    "float": lambda x: x.float().double(),
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky": F.leaky_relu,
    "rounded": lambda x: torch.where(x > 0, x, 0.25 * x),
}


@maker
def unary(pool: Pool) -> Made | None:
    i, name = pool.any(), pool.rng.choice(sorted(UNARY))
    return None if i is None else (f"{name}(v{i})", lambda v: UNARY[name](v[i]))


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b * b + 1),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "add scaled": lambda a, b: torch.add(a, b, alpha=2),
}


@maker
def binary(pool: Pool) -> Made | None:
    i = pool.any()
    if i is None:
        return None
    shape = pool.values[i].shape
    j = pool.any(where=lambda v: _broadcasts(v.shape, shape))
    name = pool.rng.choice(sorted(BINARY))
    return f"{name}(v{i}, v{j})", lambda v: BINARY[name](v[i], v[j])


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


@maker
def matmul(pool: Pool) -> Made | None:
    i = pool.any(least=2)
    if i is None:
        return None
    x = pool.values[i]
    j = pool.any(least=2, where=lambda v: v.shape[-2] == x.shape[-1] and _stacks(v, x))
    if j is not None:
        return f"v{i} @ v{j}", lambda v: v[i] @ v[j]
    return f"v{i} @ v{i}.mT", lambda v: v[i] @ v[i].mT


def _stacks(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _broadcasts(a.shape[:-2], b.shape[:-2])


@maker
def linear(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    n = pool.values[i].shape[-1]
    j = pool.any(least=2, most=2, where=lambda v: v.shape[1] == n)
    if j is None:
        return None
    out = pool.values[j].shape[0]
    k = pool.any(least=1, most=1, where=lambda v: v.shape[0] == out)
    if k is None or pool.flip():
        return f"linear(v{i}, v{j})", lambda v: F.linear(v[i], v[j])
    return f"linear(v{i}, v{j}, v{k})", lambda v: F.linear(v[i], v[j], v[k])


REDUCE: dict[str, Callable[[torch.Tensor, Any, bool], torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "var": lambda x, d, k: torch.var(x, d, correction=0, keepdim=k),
}


@maker
def reduction(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    dims, keep = pool.dims(i), pool.flip()
    name = pool.rng.choice(sorted(REDUCE))
    return f"{name}(v{i}, {dims}, {keep})", lambda v: REDUCE[name](v[i], dims, keep)


ALONG: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "cumsum": torch.cumsum,
    "max": lambda x, d: torch.max(x, d).values,
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
}


@maker
def along(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    d, name = pool.dim(i), pool.rng.choice(sorted(ALONG))
    return f"{name}(v{i}, {d})", lambda v: ALONG[name](v[i], d)


@maker
def layer_norm(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    n = pool.values[i].shape[-1]
    j = pool.any(least=1, most=1, where=lambda v: v.shape[0] == n)
    if j is None or pool.flip():
        return f"layer_norm(v{i})", lambda v: nn.layer_norm(v[i])
    return f"layer_norm(v{i}, v{j}, v{j})", lambda v: nn.layer_norm(v[i], v[j], v[j])


@maker
def view(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    x = pool.values[i]
    if x.ndim >= 2 and pool.flip():
        a = pool.rng.randint(*(0, x.ndim - 2))
        return f"v{i}.flatten({a}, {a + 1})", lambda v: v[i].flatten(a, a + 1)
    d = pool.rng.randint(*(0, x.ndim - 1))
    n = x.shape[d]
    k = pool.rng.choice([k for k in range(1, n + 1) if n % k == 0])
    return f"v{i}.unflatten({d}, ({k}, {n // k}))", lambda v: v[i].unflatten(d, (k, n // k))


@maker
def rearranged(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    x = pool.values[i]
    which = pool.rng.randint(*(0, 4))
    if which == 0:
        order = pool.rng.sample(range(x.ndim), x.ndim)
        return f"v{i}.permute({order})", lambda v: v[i].permute(order)
    if which == 1:
        a, b = pool.dim(i), pool.dim(i)
        return f"v{i}.transpose({a}, {b})", lambda v: v[i].transpose(a, b)
    if which == 2:
        d = pool.rng.randint(*(-x.ndim - 1, x.ndim))
        return f"v{i}.unsqueeze({d})", lambda v: v[i].unsqueeze(d)
    if which == 3:
        d = pool.dim(i)
        return f"v{i}.squeeze({d})", lambda v: v[i].squeeze(d)
    n = pool.rng.randint(*(2, 4))
    shape = [n, *x.shape]
    return f"v{i}.expand({shape})", lambda v: v[i].expand(shape)


@maker
def reshaped(pool: Pool) -> Made | None:
    """A reshape across dims, whose boundaries may miss the shards'."""
    i = pool.any(least=2, where=lambda v: v.numel() > 1)
    if i is None:
        return None
    n = pool.values[i].numel()
    k = pool.rng.choice([k for k in range(1, n + 1) if n % k == 0])
    return f"v{i}.reshape({k}, {n // k})", lambda v: v[i].reshape(k, n // k)


@maker
def joined(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    shape, d = pool.values[i].shape, pool.dim(i)
    if pool.flip():
        j = pool.any(where=lambda v: v.shape == shape)
        return f"stack([v{i}, v{j}], {d})", lambda v: torch.stack([v[i], v[j]], d)
    at = d % len(shape)

    def fits(v: torch.Tensor) -> bool:
        return v.ndim == len(shape) and all(
            m == n for e, (m, n) in enumerate(zip(v.shape, shape, strict=True)) if e != at
        )

    j = pool.any(where=fits)
    return f"cat([v{i}, v{j}], {d})", lambda v: torch.cat([v[i], v[j]], d)


@maker
def cut(pool: Pool) -> Made | None:
    i = pool.any(least=1, where=lambda v: min(v.shape) > 1)
    if i is None:
        return None
    d = pool.dim(i)
    n = pool.values[i].shape[d]
    which = pool.rng.randint(*(0, 4))
    a = pool.rng.randint(*(0, n - 1))
    if which == 0:
        return f"v{i}.select({d}, {a})", lambda v: v[i].select(d, a)
    if which == 1:
        return f"v{i}.narrow({d}, {a}, {n - a})", lambda v: v[i].narrow(d, a, n - a)
    if which == 2:
        k = pool.rng.randint(*(1, n))
        return f"sum of split(v{i}, {k}, {d})", lambda v: _first_and_last(v[i].split(k, d))
    if which == 3:
        pads = [0, 0] * (pool.values[i].ndim - 1 - d % pool.values[i].ndim) + [1, 2]
        return f"pad(v{i}, {pads})", lambda v: F.pad(v[i], pads)
    return f"v{i}[..., ::2]", lambda v: v[i][..., ::2]


def _first_and_last(parts: Any) -> torch.Tensor:
    return torch.cat([parts[-1], parts[0]], 0) if len(parts) == 1 else parts[0].sum() * parts[-1]


@maker
def lookup(pool: Pool) -> Made | None:
    i = pool.any(least=1, where=lambda v: v.shape[0] >= IDS)
    k = pool.ids()
    if i is None or k is None:
        return None
    x, ids = pool.values[i], pool.values[k]
    if x.ndim == 2 and pool.flip():
        pad = pool.rng.choice([None, 1])
        return (
            f"embedding(v{i}, v{k}, {pad})",
            lambda v: F.embedding(v[k], v[i], padding_idx=pad),
        )
    if ids.ndim == 1 and pool.flip():
        return f"v{i}.index_select(0, v{k})", lambda v: v[i].index_select(0, v[k])
    if ids.ndim == 0:  # torch reads the number
        return None
    if pool.flip():
        return f"v{i}[-1 - v{k}]", lambda v: v[i][-1 - v[k]]
    return f"v{i}[v{k}]", lambda v: v[i][v[k]]


@maker
def gathered(pool: Pool) -> Made | None:
    k = pool.ids()
    if k is None:
        return None
    ids = pool.values[k]
    if ids.ndim == 0:
        return None
    d = pool.dim(k)

    def fits(v: torch.Tensor) -> bool:
        return v.ndim == ids.ndim and all(
            n >= (IDS if e == d % ids.ndim else m)
            for e, (n, m) in enumerate(zip(v.shape, ids.shape, strict=True))
        )

    i = pool.any(least=1, where=fits)
    return None if i is None else (f"v{i}.gather({d}, v{k})", lambda v: v[i].gather(d, v[k]))


@maker
def cross_entropy(pool: Pool) -> Made | None:
    k = pool.ids()
    if k is None:
        return None
    lead = pool.values[k].shape
    i = pool.any(least=1, where=lambda v: v.shape[:-1] == lead and v.shape[-1] >= IDS)
    if i is None:
        return None
    how = pool.rng.choice(["mean", "sum", "none"])
    ignore = pool.rng.choice([-100, 1])
    return (
        f"cross_entropy(v{i}, v{k}, {how!r}, {ignore})",
        lambda v: nn.cross_entropy(v[i], v[k], how, ignore) if how != "mean" else _mean(v[i], v[k]),
    )


def _mean(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.cross_entropy(logits, ids)


@maker
def dropout(pool: Pool) -> Made | None:
    i = pool.any()
    if i is None:
        return None
    seed = pool.rng.randint(*(0, 3))
    return (
        f"dropout(key(0) + {seed}, v{i})",
        lambda v: nn.dropout(random.fold_in(v[0], seed), v[i], 0.5),
    )


@maker
def positions(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    return (
        f"v{i} + arange",
        lambda v: v[i] + torch.arange(v[i].shape[-1], device=v[i].device) * 0.1,
    )


@maker
def causal(pool: Pool) -> Made | None:
    i = pool.any(least=2)
    if i is None:
        return None
    return f"softmax(tril(v{i}))", lambda v: torch.softmax(_masked(v[i]), -1)


def _masked(x: torch.Tensor) -> torch.Tensor:
    allowed = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return x.masked_fill(~allowed, float("-inf"))


@maker
def pinned(pool: Pool) -> Made | None:
    i = pool.any(least=1)
    if i is None:
        return None
    spec = random_spec(pool.rng, pool.values[i].shape, pool.mesh, fused=True)
    return f"constrain(v{i}, {spec})", lambda v: constrain(v[i], spec)
