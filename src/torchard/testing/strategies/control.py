"""Steps of random programs that are loops and branches, as `operations.py` has others."""

from __future__ import annotations

from torchard.testing.strategies.operations import UNARY, Operation
from torchard.testing.strategies.pool import Pool

__all__ = ["CONTROL"]

_ASSOCIATIVE = ("torch.add", "torch.maximum", "torch.logaddexp", "lambda a, b: a * b")
_STEPS = ("torch.tanh(c + x), c * x", "c + x, c", "torch.maximum(c, x), x.sum() + c.sum()")


def _body(pool: Pool) -> str:
    """An expression of x, of the same shape and dtype."""
    return pool.choice(UNARY).format(x="x", dtype=pool.dtype)


def _branches(pool: Pool) -> str | None:
    x = pool.any()
    pred = pool.choice(("{x}.sum() > 0", "{x}.numel() > 3")).format(x=x)
    return x and f"cond({pred}, lambda x: {_body(pool)}, lambda x: {_body(pool)}, {x})"


def _scanned(pool: Pool) -> str | None:
    x = pool.any(least=1)
    reverse = ", reverse=True" if pool.flip() else ""
    step, result = pool.choice(_STEPS), pool.choice((0, 1))
    return x and f"scan(lambda c, x: ({step}), {x}[0], {x}{reverse})[{result}]"


def _counted(pool: Pool) -> str | None:
    x = pool.any()
    return x and f"fori_loop(0, {pool.choice(range(4))}, lambda i, x: {_body(pool)}, {x})"


def _shrunk(pool: Pool) -> str | None:
    x = pool.any()
    return x and f"while_loop(lambda x: x.abs().sum() > 1, lambda x: {_body(pool)} / 2, {x}, 6)"


def _prefixes(pool: Pool) -> str | None:
    x = pool.any(least=1)
    reverse = ", reverse=True" if pool.flip() else ""
    return x and f"associative_scan({pool.choice(_ASSOCIATIVE)}, {x}, {pool.dim(x)}{reverse})"


# Simplest first.
CONTROL: tuple[Operation, ...] = (_branches, _scanned, _counted, _shrunk, _prefixes)
