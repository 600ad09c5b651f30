"""The steps of random programs: ways to compute one more value from those there are, as Python text.

A function here is given the pool of values and returns an expression, or None if no values fit. Simpler
choices come first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchard.sharding.testing import random_spec
from torchard.testing.strategies.pool import IDS, Pool

__all__ = ["OPERATIONS", "UNARY", "Operation"]

Operation = Callable[[Pool], str | None]

UNARY = (
    *("-{x}", "torch.abs({x})", "torch.relu({x})", "torch.square({x})", "{x} + 1", "{x} / 2"),
    *("torch.tanh({x})", "torch.sin({x})", "torch.sigmoid({x})", "nn.gelu({x})", "nn.silu({x})"),
    *("F.softplus({x})", "F.elu({x})", "F.leaky_relu({x})", "{x}.clamp(-0.5, 0.5)"),
    "{x}.masked_fill({x} > 0.3, 0.0)",
    "torch.where({x} > 0, {x}, 0.25 * {x})",
    "{x} * torch.ones_like({x}) + torch.zeros_like({x})",
    "{x}.float().to({dtype})",
)
_BINARY = (
    *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y} * {y} + 1)", "torch.maximum({x}, {y})"),
    "torch.where({x} > {y}, {x}, {y})",
    "torch.add({x}, {y}, alpha=2)",
)
_REDUCTIONS = (
    *("{x}.sum({dims}{keep})", "{x}.mean({dims}{keep})", "{x}.amax({dims}{keep})"),
    *(
        "{x}.amin({dims}{keep})",
        "{x}.logsumexp({dims}{keep})",
        "{x}.var({dims}, correction=0{keep})",
    ),
)
_ALONG = (
    *("{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cumsum({d})", "{x}.max({d}).values"),
    *("{x}.flip({d})", "{x}.roll(1, {d})"),
)


def _unary(pool: Pool) -> str | None:
    x = pool.any()
    return x and pool.choice(UNARY).format(x=x, dtype=pool.dtype)


def _binary(pool: Pool) -> str | None:
    x = pool.any()
    if x is None:
        return None
    shape = pool[x].shape
    y = pool.any(fits=lambda v: _broadcast(v.shape, shape))
    return pool.choice(_BINARY).format(x=x, y=y)


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def _reduction(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    dims, keep = pool.dims(x), ", keepdim=True" if pool.flip() else ""
    return pool.choice(_REDUCTIONS).format(x=x, dims=dims[0] if len(dims) == 1 else dims, keep=keep)


def _along(pool: Pool) -> str | None:
    x = pool.any(least=1)
    return x and pool.choice(_ALONG).format(x=x, d=pool.dim(x))


# -- products -----------------------------------------------------------------------------------------


def _matmul(pool: Pool) -> str | None:
    x = pool.any(least=2)
    if x is None:
        return None
    a = pool[x]
    y = pool.any(least=2, fits=lambda b: b.shape[-2] == a.shape[-1] and _stack(a, b))
    return f"{x} @ {y}" if y else f"{x} @ {x}.mT"


def _stack(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _broadcast(a.shape[:-2], b.shape[:-2])


def _linear(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    inner = pool[x].shape[-1]
    w = pool.any(least=2, most=2, fits=lambda v: v.shape[1] == inner)
    if w is None:
        return None
    outer = pool[w].shape[0]
    b = pool.any(least=1, most=1, fits=lambda v: v.shape[0] == outer) if pool.flip() else None
    return f"nn.linear({x}, {w}, {b})" if b else f"nn.linear({x}, {w})"


# -- views and copies ---------------------------------------------------------------------------------


def _view(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    shape = pool[x].shape
    d = pool.choice(range(len(shape)))
    if d + 1 < len(shape) and pool.flip():
        return f"{x}.flatten({d}, {d + 1})"
    outer = pool.choice(_divisors(shape[d]))
    return f"{x}.unflatten({d}, ({outer}, {shape[d] // outer}))"


def _reshape(pool: Pool) -> str | None:
    """A reshape across dims, whose boundaries may miss those of shards."""
    x = pool.any(least=2, fits=lambda v: v.numel() > 1)
    if x is None:
        return None
    outer = pool.choice(_divisors(pool[x].numel()))
    return f"{x}.reshape({outer}, {pool[x].numel() // outer})"


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _rearranged(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    rank = pool[x].ndim
    how = pool.choice(("transpose", "permute", "unsqueeze", "squeeze", "expand"))
    if how == "transpose":
        return f"{x}.transpose({pool.dim(x)}, {pool.dim(x)})"
    if how == "permute":
        return f"{x}.permute({tuple(pool.some(range(rank), rank))})"
    if how == "unsqueeze":
        return f"{x}.unsqueeze({pool.choice([*range(rank + 1), *range(-rank - 1, 0)])})"
    if how == "squeeze":
        return f"{x}.squeeze({pool.dim(x)})"
    return f"{x}.expand({(pool.choice((2, 3, 4)), *pool[x].shape)})"


def _joined(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    shape, d = pool[x].shape, pool.dim(x)
    if pool.flip():
        y = pool.any(fits=lambda v: v.shape == shape)
        return f"torch.stack([{x}, {y}], {d})"
    y = pool.any(fits=lambda v: _alike_but(d % len(shape), v.shape, shape))
    return f"torch.cat([{x}, {y}], {d})"


def _alike_but(dim: int, a: torch.Size, b: torch.Size) -> bool:
    return len(a) == len(b) and all(
        m == n or d == dim for d, (m, n) in enumerate(zip(a, b, strict=True))
    )


def _part(pool: Pool) -> str | None:
    x = pool.any(least=1, fits=lambda v: min(v.shape) > 1)
    if x is None:
        return None
    rank, d = pool[x].ndim, pool.dim(x)
    n = pool[x].shape[d]
    how = pool.choice(("select", "narrow", "step", "split", "pad"))
    if how == "step":
        return f"{x}[..., ::2]"
    if how == "pad":
        return f"F.pad({x}, {(0, 0) * (rank - 1 - d % rank) + (1, 2)})"
    start = pool.choice(range(n))
    if how == "select":
        return f"{x}.select({d}, {start})"
    if how == "narrow":
        return f"{x}.narrow({d}, {start}, {n - start})"
    size = n - start
    return f"{x}.split({size}, {d})[0].sum() * {x}.split({size}, {d})[-1]"


# -- ids ----------------------------------------------------------------------------------------------


def _lookup(pool: Pool) -> str | None:
    ids = pool.ids()
    x = pool.any(least=1, fits=lambda v: v.shape[0] >= IDS)
    if ids is None or x is None:
        return None
    ways = []
    if pool[ids].ndim:  # of a scalar torch reads the number
        ways += [f"{x}[{ids}]", f"{x}[-1 - {ids}]"]
    if pool[ids].ndim == 1:
        ways.append(f"{x}.index_select(0, {ids})")
    if pool[x].ndim == 2:
        ways += [f"nn.embedding({x}, {ids})", f"F.embedding({ids}, {x}, padding_idx=1)"]
    return pool.choice(ways) if ways else None


def _gathered(pool: Pool) -> str | None:
    ids = pool.ids()
    if ids is None or not pool[ids].ndim:
        return None
    shape, d = pool[ids].shape, pool.dim(ids)
    least = [IDS if e == d % len(shape) else n for e, n in enumerate(shape)]
    x = pool.any(fits=lambda v: v.ndim == len(least) and all(map(int.__ge__, v.shape, least)))
    return x and f"{x}.gather({d}, {ids})"


def _cross_entropy(pool: Pool) -> str | None:
    ids = pool.ids()
    if ids is None:
        return None
    leading = pool[ids].shape
    x = pool.any(least=1, fits=lambda v: v.shape[:-1] == leading and v.shape[-1] >= IDS)
    if x is None:
        return None
    how = pool.choice(("", ", 'sum'", ", 'none'", ", 'sum', 1", ", 'none', 1"))
    return f"nn.cross_entropy({x}, {ids}{how})"


# -- layers -------------------------------------------------------------------------------------------


def _layer_norm(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None:
        return None
    n = pool[x].shape[-1]
    w = pool.any(least=1, most=1, fits=lambda v: v.shape[0] == n) if pool.flip() else None
    return f"nn.layer_norm({x}, {w}, {w})" if w else f"nn.layer_norm({x})"


def _dropout(pool: Pool) -> str | None:
    x = pool.any()
    return x and f"nn.dropout(random.fold_in(key, {pool.choice(range(4))}), {x}, 0.5)"


def _positions(pool: Pool) -> str | None:
    x = pool.any(least=1)
    return x and f"{x} + torch.arange({x}.shape[-1], device={x}.device) * 0.1"


def _causal(pool: Pool) -> str | None:
    x = pool.any(least=2)
    mask = f"torch.ones({x}.shape[-2:], dtype=torch.bool, device={x}.device).tril()"
    return x and f"{x}.masked_fill(~{mask}, -torch.inf).softmax(-1)"


def _constrained(pool: Pool) -> str | None:
    x = pool.any(least=1)
    if x is None or pool.mesh is None:
        return None
    return f"constrain({x}, {random_spec(pool.rng, pool[x].shape, pool.mesh, fused=True)})"


# Simplest first; what is in every model is twice or three times as likely.
OPERATIONS: tuple[Operation, ...] = (
    *(_unary, _unary, _unary, _binary, _binary, _binary, _reduction, _along),
    *(_matmul, _matmul, _linear, _linear, _layer_norm, _causal, _dropout, _positions),
    *(_view, _reshape, _rearranged, _joined, _part),
    *(_lookup, _lookup, _gathered, _cross_entropy, _constrained),
)
