"""Random functions of nested scans, conditionals, loops, and functions with rules for derivatives.

Outside of transforms these are Python loops and branches, so the plain function is the reference.

``python tests/support/random_control.py COUNT [FIRST]`` judges so many under random stacks.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from random_loops import BINARY, UNARY
from random_stacks import FAILED, WRONG, draw, judge

from torchard import (
    Mesh,
    ShapeDtype,
    associative_scan,
    checked,
    cond,
    custom_jvp,
    custom_vjp,
    debug,
    error_if,
    fori_loop,
    implicit,
    map,
    pure_callback,
    scan,
    switch,
    while_loop,
)

__all__ = ["random_control"]

Tensors = tuple[torch.Tensor, ...]
Step = Callable[[torch.Tensor, Tensors], torch.Tensor]
SHAPE = (2, 3)
# Nested loops are unrolled: deeper ones take long.
DEPTH = 2


def random_control(rng: Random, mesh: Mesh) -> tuple[str, Callable[..., Tensors], Tensors]:
    """Its text, a function, and its inputs: two of [2, 3], one of [3, 2, 3]."""
    said, steps = list[str](), [_step(rng, DEPTH) for _ in range(rng.randint(1, 3))]
    said = [step.__name__ for step in steps]
    generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
    shapes = [SHAPE, SHAPE, (3, *SHAPE)]
    inputs = tuple(torch.randn(s, generator=generator, dtype=torch.float64) * 0.7 for s in shapes)

    def fn(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> Tensors:
        for step in steps:
            x = step(x, (y, rows))
        return x, x.sum()

    return f"control({said})", fn, inputs


def _named(name: str, step: Step) -> Step:
    step.__name__ = name
    return step


def _step(rng: Random, depth: int) -> Step:
    kinds = [_unary, _binary]
    if depth:
        kinds += [_prefixes, _asked, _effect, _scan, _cond, _cond, _while, _map]
        kinds += [_detached, _ruled, _ruled, _root]
    return rng.choice(kinds)(rng, depth - 1)


def _block(rng: Random, depth: int) -> Step:
    """One or two steps."""
    steps = [_step(rng, depth) for _ in range(rng.randint(1, 2))]

    def block(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        for step in steps:
            x = step(x, others)
        return x

    return _named("; ".join(step.__name__ for step in steps), block)


def _unary(rng: Random, depth: int) -> Step:
    name = rng.choice([name for name in UNARY if name != "checked"])
    return _named(name, lambda x, others: UNARY[name](x))


def _binary(rng: Random, depth: int) -> Step:
    name = rng.choice(list(BINARY))
    return _named(name, lambda x, others: BINARY[name](x, others[0]))


def _pred(rng: Random) -> Callable[[torch.Tensor, Tensors], Any]:
    """A condition: of values, of what is closed over, or known when the function is traced."""
    bound = rng.uniform(-1, 1)
    return rng.choice(
        [
            lambda x, others: x.sum() > bound,
            lambda x, others: (x > bound).all(),
            lambda x, others: others[0].mean() < bound,
            lambda x, others: bound > 0,
        ]
    )


def _cond(rng: Random, depth: int) -> Step:
    """A branch on a value; operands are passed or closed over."""
    pred, one, other = _pred(rng), _block(rng, depth), _block(rng, depth)
    if rng.random() < 0.3:
        third, k = _block(rng, depth), rng.randint(0, 2)

        def switched(x: torch.Tensor, others: Tensors) -> torch.Tensor:
            index = (x.sum() > 0).long() + k
            branches = [lambda x, way=way: way(x, others) for way in (one, other, third)]
            return switch(index, branches, x)

        return _named(f"switch({one.__name__}, {other.__name__}, {third.__name__})", switched)
    passed = rng.random() < 0.5

    def branched(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        if passed:
            return cond(pred(x, others), one, other, x, others)
        pair = cond(pred(x, others), lambda: (one(x, others), 1), lambda: (other(x, others), 2))
        return pair[0] * 0.5 + pair[1]

    return _named(f"cond({one.__name__}, {other.__name__})", branched)


def _scan(rng: Random, depth: int) -> Step:
    """A scan over rows with a carry, an integer that counts, and what it collects."""
    block = _block(rng, depth)
    reverse, unroll, collect = rng.random() < 0.3, rng.choice([1, 1, 2, True]), rng.random() < 0.5
    if rng.random() < 0.2:
        return _named(
            f"fori({block.__name__})",
            lambda x, others: fori_loop(0, 2, lambda i, x: block(x + i, others) / 2, x),
        )

    def scanned(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        def body(carry: Any, row: torch.Tensor) -> Any:
            x, n = carry
            x = block(x + row, others) / 2
            return (x, n + 1), {"x": x.sin(), "n": n, "none": None} if collect else None

        (x, n), ys = scan(body, (x, 0), others[1], reverse=reverse, unroll=unroll)
        x = x + n
        return x + (ys["x"] * ys["n"].reshape(-1, 1, 1)).sum(0) if collect else x

    return _named(f"scan({block.__name__}, {reverse}, {unroll}, {collect})", scanned)


def _while(rng: Random, depth: int) -> Step:
    """A loop that ends by a count and by a value."""
    block, bound, most = _block(rng, depth), rng.uniform(0, 2), rng.choice([2, 3, 5])
    limited = rng.random() < 0.8

    def looped(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        def body(carry: Any) -> Any:
            x, n = carry
            return block(x, others) * 0.7, n + 1

        def going(carry: Any) -> Any:
            x, n = carry
            return (n < 4) & (x.square().sum() > bound)

        x, n = while_loop(going, body, (x, 0), most if limited else None)
        return x + n

    return _named(f"while({block.__name__}, {most if limited else None})", looped)


def _map(rng: Random, depth: int) -> Step:
    block, batch = _block(rng, depth), rng.choice([None, 1, 2])
    return _named(
        f"map({block.__name__}, {batch})",
        lambda x, others: x + map(lambda row: block(row, others), others[1], batch).mean(0),
    )


def _prefixes(rng: Random, depth: int) -> Step:
    combine = rng.choice([torch.add, torch.maximum, torch.logaddexp, _affine])
    dim, reverse = rng.choice([0, 1, -1]), rng.random() < 0.5

    def scanned(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        if combine is _affine:
            return torch.tanh(associative_scan(_affine, (others[0], x), dim, reverse)[1])
        return torch.tanh(associative_scan(combine, x, dim, reverse))

    return _named(f"prefixes({combine.__name__}, {dim}, {reverse})", scanned)


def _affine(f: Any, g: Any) -> Any:
    return f[0] * g[0], f[1] * g[0] + g[1]


def _asked(rng: Random, depth: int) -> Step:
    inner = _block(rng, depth)

    def asked(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        error_if(x.isnan(), "nan")
        return checked(lambda x: inner(x, others))(x)

    return _named(f"checked({inner.__name__})", asked)


def _effect(rng: Random, depth: int) -> Step:
    """A call of a Python function, which sees what it is given."""
    name = rng.choice(["callback", "pure"])

    def seen(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        if name == "pure":
            size = ShapeDtype((), torch.float64)
            return x + pure_callback(lambda x: x.sum(), size, x.detach())
        debug.callback(lambda *values: None, x, others[0], name)
        return x

    return _named(name, seen)


def _detached(rng: Random, depth: int) -> Step:
    """A loop without a bound, of which no derivative is taken."""
    block, bound = _block(rng, depth), rng.uniform(0, 2)

    def looped(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        def going(carry: Any) -> Any:
            return (carry[1] < 3) & (carry[0].square().sum() > bound)

        fixed = tuple(other.detach() for other in others)
        made, _ = while_loop(
            going, lambda carry: (block(carry[0], fixed) * 0.7, carry[1] + 1), (x.detach(), 0)
        )
        return x * made.detach().sin()

    return _named(f"detached while({block.__name__})", looped)


def _ruled(rng: Random, depth: int) -> Step:
    """A block whose rule is torch's derivative of it, with residuals of several kinds."""
    block, forward, residual = _block(rng, depth), rng.random() < 0.4, rng.randint(0, 2)

    def fn(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return block(x, (y, rows))

    if forward:
        pushed = custom_jvp(fn)
        pushed.defjvp(lambda primals, tangents: torch.func.jvp(fn, primals, tangents))
        return _named(f"custom_jvp({block.__name__})", lambda x, others: pushed(x, *others))

    def fwd(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> Any:
        at = [x, x.sinh().asinh(), x.clone()][residual]
        result = fn(x, y, rows)
        return result, {"x": at, "y": y, "rows": [rows, result], "n": 2}

    def bwd(residuals: Any, cotangent: torch.Tensor) -> Any:
        rows, _ = residuals["rows"]
        pulled = torch.func.vjp(fn, residuals["x"], residuals["y"], rows)[1]
        return pulled(cotangent * residuals["n"] / 2)

    pulled = custom_vjp(fn)
    pulled.defvjp(fwd, bwd)
    return _named(f"custom_vjp({block.__name__}, {residual})", lambda x, others: pulled(x, *others))


def _root(rng: Random, depth: int) -> Step:
    """The root of an equation that a block is part of; found without the solver, x = block + y."""
    block = _block(rng, 0)

    def solved(x: torch.Tensor, others: Tensors) -> torch.Tensor:
        def f(z: torch.Tensor, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return 2 * (z - block(x, (y, rows)))

        return implicit.root(f, torch.zeros_like(x), x, *others, solve=lambda f, z: z - f(z) / 2)

    return _named(f"root({block.__name__})", solved)


def main() -> None:
    """Judge random programs, and list what is wrong."""
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        case = draw(seed, [random_control])
        verdict = judge(case)
        counts[verdict.kind] += 1
        if verdict.kind in (WRONG, FAILED):
            print(f"{verdict.kind}: {case}\n    {verdict.why}", flush=True)
        elif verdict.kind == "refused":
            counts[f"refused: {verdict.why[:90]}"] += 1
    for kind, number in counts.most_common():
        print(number, kind)


if __name__ == "__main__":
    main()
