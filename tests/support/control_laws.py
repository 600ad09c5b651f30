"""Words over transforms and derivations, on loops, branches, rules and checks: right, or refused.

    python tests/support/control_laws.py --every 500 --out tests/results/control-laws.md

A word is a stack, written from the inside out: up to three of the transforms, and a derivation before,
after or among them. Outside of transforms the functions are Python's loops and branches, so the plain
function is the reference; what solvers compute is compared with a closed form in their own tests.
"""

from __future__ import annotations

import argparse
import random as python_random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from library_laws import draw, judged, results_text, told
from torch import Tensor

import torchard as ta
from torchard import Mesh, accumulate, jit

TRANSFORMS = ("shard", "checkpoint", "fuse", "jit", "accumulate", "vmap")
DERIVATIONS: dict[str, tuple[str, ...]] = {
    "value": (),
    "gradient": ("grad",),
    "second gradient": ("grad", "grad"),
    "jvp": ("jvp",),
    "vmap": ("vmap",),
    "vmap of gradient": ("grad", "vmap"),
    "Hessian-vector product": ("grad", "jvp"),
}
STACKS = [stack for n in range(1, 4) for stack in product(TRANSFORMS, repeat=n)]
MESHES = [
    Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})
]
ARGS = draw(1, 4, 4), draw(2, 24, 4)  # weights, and a batch that all meshes and slices divide
SCALES = torch.tensor([0.9, -0.4, 0.7], dtype=torch.float64)
Fn = Callable[[Tensor, Tensor], Any]
FUNCTIONS: dict[str, Fn] = {}


def function(name: str) -> Callable[[Fn], Fn]:
    def add(fn: Fn) -> Fn:
        FUNCTIONS[name] = fn
        return fn

    return add


@function("scan")
def _(w: Tensor, x: Tensor) -> Any:
    def body(h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w) * scale
        return h, h.square().mean()

    return ta.scan(body, x, SCALES.to(x.dtype))


@function("scan, reversed, of several carries")
def _(w: Tensor, x: Tensor) -> Any:
    def body(carry: Any, scale: Tensor) -> tuple[Any, None]:
        h, n, none = carry
        return (torch.sin(h @ w * scale) + n, n + 1, none), None

    (h, n, _none), _ = ta.scan(body, (x, 0, None), SCALES.to(x.dtype), reverse=True)
    return h * n


@function("scan of scans")
def _(w: Tensor, x: Tensor) -> Any:
    def outer(h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h, ys = ta.scan(lambda h, s: (torch.tanh(h @ w + s), h.mean()), h, SCALES.to(x.dtype))
        return h * scale, ys

    return ta.scan(outer, x, SCALES.to(x.dtype))


@function("fori_loop")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.fori_loop(1, 4, lambda i, h: torch.tanh(h @ w) / i, x)


@function("map")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.map(lambda row: torch.tanh(row @ w).cumsum(0), x)


@function("while_loop, bounded")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.while_loop(
        lambda c: c[1] < 3, lambda c: (torch.tanh(c[0] @ w), c[1] + 1), (x, 0), max_steps=5
    )[0]


@function("while_loop")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.while_loop(lambda c: c[1] < 3, lambda c: (torch.tanh(c[0] @ w), c[1] + 1), (x, 0))[0]


@function("cond")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.cond(w.sum() > 0, lambda x: torch.tanh(x @ w), lambda x: torch.sin(x @ w.mT), x)


@function("switch in scan")
def _(w: Tensor, x: Tensor) -> Any:
    branches = [lambda h: torch.tanh(h @ w), lambda h: h * w.sum(), torch.sin]
    return ta.scan(lambda h, i: (ta.switch(i, branches, h), h.mean()), x, torch.tensor([2, 0, 1]))


@function("associative_scan of the batch")
def _(w: Tensor, x: Tensor) -> Any:
    def compose(f: Any, g: Any) -> Any:
        return f[0] * g[0], f[1] * g[0] + g[1]

    return ta.associative_scan(compose, (torch.sigmoid(x), x @ w))[1]


@function("associative_scan of features")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.associative_scan(torch.maximum, x @ w, dim=1, reverse=True)


@ta.custom_vjp
def _clipped(x: Tensor) -> Tensor:
    return torch.tanh(x)


_clipped.defvjp(lambda x: (torch.tanh(x), torch.tanh(x)), lambda y, g: (g * (1 - y * y),))


@ta.custom_jvp
def _softened(x: Tensor) -> Tensor:
    return torch.sin(x)


_softened.defjvp(lambda primals, tangents: (torch.sin(primals[0]), torch.cos(primals[0]) * tangents[0]))


@function("custom_vjp")
def _(w: Tensor, x: Tensor) -> Any:
    return _clipped(x @ w) * _clipped(w.sum())


@function("custom_jvp")
def _(w: Tensor, x: Tensor) -> Any:
    return _softened(x @ w) * _softened(w.sum())


@function("implicit.root")
def _(w: Tensor, x: Tensor) -> Any:
    """y = tanh(y w / 4 + x), by iterations that converge."""

    def solve(fn: Any, y: Tensor) -> Tensor:
        return ta.fori_loop(0, 40, lambda _, y: y - fn(y), y)

    def residual(y: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return y - torch.tanh(y @ w / 4 + x)

    return ta.implicit.root(residual, torch.zeros_like(x), w, x, solve=solve, tangent_solve=_neumann)


def _neumann(matvec: Any, b: Tensor) -> Tensor:
    """The y with matvec(y) = b, of a matrix that is near the identity."""
    return ta.fori_loop(0, 40, lambda _, y: y + b - matvec(y), b)


@function("implicit.linear_solve")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.implicit.linear_solve(lambda y, w: y + y @ w / 6, x, w, solve=_neumann)


@function("checked")
def _(w: Tensor, x: Tensor) -> Any:
    return ta.checked(lambda x: torch.tanh(x @ w).exp(), nan=True, inf=True, index=True)(x)


@function("error_if in scan")
def _(w: Tensor, x: Tensor) -> Any:
    def body(h: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        h = torch.tanh(h @ w) * scale
        ta.error_if(h.abs().max() > 5, "diverged")
        return h, None

    return ta.scan(body, x, SCALES.to(x.dtype))[0]


@function("closure_convert")
def _(w: Tensor, x: Tensor) -> Any:
    pure, values = ta.closure_convert(lambda h: torch.tanh(h @ w), x)
    return pure(x, *values) * 2


def _accumulated(fn: Any) -> Any:
    return accumulate(fn, 2, batch=(None, 0))


def words(every: int, seed: int = 0) -> Iterator[tuple[str, tuple[Any, ...], Mesh, torch.dtype]]:
    """One in so many of all: a function, a stack, a mesh and a dtype."""
    rng = python_random.Random(seed)
    for name, letters, stack in product(FUNCTIONS, DERIVATIONS.values(), STACKS):
        if rng.randrange(every):
            continue
        word: list[Any] = list(stack)
        place = 0
        for letter in letters:
            place = rng.randint(place, len(word))
            word.insert(place, letter)
            place += 1
        dtype = rng.choice([torch.float64, torch.float64, torch.float32])
        yield name, tuple(word), rng.choice(MESHES), dtype


def outcome(
    name: str, word: tuple[Any, ...], mesh: Mesh, dtype: torch.dtype, inductor: bool = False
) -> str:
    """Nothing if the word equals the derivations of the plain function; else the refusal (`judged`)."""
    layers = {"accumulate": _accumulated} | ({"jit": jit} if inductor else {})
    args = tuple(x.to(dtype) for x in ARGS)
    return judged(FUNCTIONS[name], args, tuple(layers.get(x, x) for x in word), mesh)


def table(every: int, inductor: int, seed: int = 0) -> tuple[str, int]:
    """The results of one in so many words, and how many were wrong."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in FUNCTIONS}
    refused, wrong, began = Counter[str](), list[str](), time.monotonic()
    for n, (name, word, mesh, dtype) in enumerate(words(every, seed)):
        compiled = "jit" in word and n % inductor == 0
        kind = "right"
        said = f"{name}, {' '.join(word)}, {mesh.sizes}, {dtype}{', Inductor' if compiled else ''}"
        try:
            if why := outcome(name, word, mesh, dtype, compiled):
                kind = "refused"
                refused[f"{name}: {why}"] += 1
        except Exception as error:  # told in the table, and by the exit status
            kind = "wrong"
            wrong.append(f"{said}: {type(error).__name__}: {str(error)[:300]}")
            print(wrong[-1], file=sys.stderr, flush=True)
        counts[name].update([kind, *["Inductor"] * compiled])
        if n % 100 == 99:
            print(f"{n + 1} words, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    counts["all"] = sum(counts.values(), Counter[str]())
    columns = ("right", "refused", "wrong", "Inductor")
    rows = [
        f"| {name} | {' | '.join(str(found[k]) for k in columns)} |" for name, found in counts.items()
    ]
    head = HEAD.format(every=every, seed=seed, seconds=time.monotonic() - began)
    reasons = [f"{n} × {why}" for why, n in sorted(refused.items())]
    return head + results_text(rows, reasons, wrong), len(wrong)


HEAD = f"""# Control flow, rules, solvers and checks under transforms

Stacks of up to three of {", ".join(TRANSFORMS)}, with
{", ".join(DERIVATIONS)}
before, after or among them, on virtual meshes of 2, 3, 4 and 2 × 2 ranks, in float64 and float32: one
in {{every}} of {len(FUNCTIONS) * len(DERIVATIONS) * len(STACKS):,} (seed {{seed}}, {{seconds:.0f}} s).
Right: equal to the plain function's.

| function | right | refused | wrong | of these by Inductor |
|---|---:|---:|---:|---:|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--inductor", type=int, default=20, help="of words with jit, one in so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the file of the table; by default it is printed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    return told(*table(options.every, options.inductor, options.seed), options.out)


if __name__ == "__main__":
    sys.exit(main())
