"""Random functions that apply a block n times: by `repeat`, and by a loop over the layers' parameters.

Without a transform around it, `repeat` is a Python loop; so the plain function is the reference. Equal
layers become a loop if that saves many operations; here any do.

``python tests/support/random_loops.py COUNT [FIRST]`` judges so many of each under random stacks.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from random_stacks import FAILED, WRONG, draw, judge

from torchard import Mesh, checkpoint, name, random, repeat, scope, trace, tree
from torchard.functional.loops import equal_layers
from torchard.functional.loops.recognised import recognised
from torchard.functional.loops.rolled import rolled
from torchard.functional.programs.program import Program

__all__ = ["random_layers", "random_loop", "random_program"]

Tensors = tuple[torch.Tensor, ...]
Drawn = tuple[str, Callable[..., Tensors], Tensors]
Step = Callable[[list[torch.Tensor]], torch.Tensor]

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "square": lambda x: x * x / 4,
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0) / 2,
    "flip": lambda x: x.flip(-1),
    "turned": lambda x: x.t().reshape(2, 3),
    "norm": lambda x: F.layer_norm(x, (3,)),
    "sum": lambda x: x.sum(-1, keepdim=True).expand(2, 3) / 3,
    "rows": lambda x: x[torch.tensor([1, 0])],
    "detached": lambda x: x.detach() + x,
    "named": lambda x: name(x.sigmoid(), "kept"),
    "scoped": lambda x: _in_scope(x),
    "written": lambda x: _written(x),
    "constant": lambda x: x + torch.arange(3, dtype=x.dtype),
    "without": lambda x: x + _without(x),
    "checked": lambda x: checkpoint(lambda y: torch.tanh(y).sin())(x),
    "linear": lambda x: x * 2 - 1,
    "pulled": lambda x: x - torch.func.grad(lambda y: y.sin().sum())(x) / 2,
    "cut": lambda x: torch.cat([x[:1] * 2, x[1:]]),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b / 2,
    "sub": lambda a, b: a - b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
}


def _in_scope(x: torch.Tensor) -> torch.Tensor:
    with scope("inner"):
        return torch.cos(x)


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 0.5
    y.mul_(2)
    return y


def _without(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mean()


def random_loop(rng: Random, mesh: Mesh) -> Drawn:
    """Its text, a function, and its inputs: carries [2, 3], stacked operands, shared ones."""
    return _drawn(rng, rng.choice([1, 2, 3, 4]))[0]


def random_layers(rng: Random, mesh: Mesh) -> Drawn:
    """The same with a Python loop, and the operands of each layer apart."""
    (text, fn, inputs), stacked = _drawn(rng, rng.choice([3, 3, 4, 5]), _by_hand)
    apart = [x.unbind(0) if each else (x,) for x, each in zip(inputs, stacked, strict=True)]

    def of_layers(*xs: torch.Tensor) -> Tensors:
        rest = iter(xs)
        taken = [[next(rest) for _ in parts] for parts in apart]
        return fn(*(x if each else x[0] for x, each in zip(taken, stacked, strict=True)))

    return f"by hand: {text}", of_layers, tuple(x for parts in apart for x in parts)


def random_program(seed: int) -> tuple[Program, Tensors]:
    """A random program with loops of up to nine iterations: a function, or its gradient; its inputs."""
    rng = Random(seed)
    if rng.random() < 0.5:
        _, fn, inputs = random_layers(rng, Mesh({"x": 2}, virtual=True))
    else:
        (_, fn, inputs), _ = _drawn(rng, rng.choice([1, 2, 5, 7, 9]))

    def loss(*xs: torch.Tensor) -> torch.Tensor:
        return torch.stack([out.sin().sum() for out in fn(*xs)]).sum()

    way: Any = rng.choice([fn, loss, torch.func.grad(loss, tuple(range(len(inputs))))])
    program = recognised(rolled(trace(way)(*inputs)))
    return program, (*inputs, *program.constants)


def _by_hand(
    block: Callable[..., Any],
    rows: Any,
    x: Any,
    *rest: Any,
    collect: bool = False,
    key: torch.Tensor | None = None,
    index: bool = False,
) -> Any:
    """What `repeat` does, but for lists of rows; what is collected is not stacked either."""
    collected = []
    keys = None if key is None else random.split(key, len(rows[0]))
    for i in range(len(rows[0])):
        given = {} if keys is None else {"key": keys[i]}
        given |= {"index": torch.tensor(i)} if index else {}
        with scope(f"block/{i}"):
            x = block([row[i] for row in rows], x, *rest, **given)
        if collect:
            x, y = x
            collected.append(y)
    return (x, {name: [y[name] for y in collected] for name in collected[0]}) if collect else x


def _drawn(
    rng: Random, count: int, repeat: Callable[..., Any] = repeat
) -> tuple[Drawn, list[bool]]:
    """What is drawn, and which of its inputs are stacked."""
    carries = rng.choice([1, 1, 2])
    row_shapes = rng.choices([(3, 3), (3,), (2, 3), ()], k=rng.choice([1, 1, 2, 3]))
    shared_shapes = rng.choices([(3,), (2, 3), ()], k=rng.choice([0, 1, 1]))
    shapes = [*[(2, 3)] * carries, *((count, *shape) for shape in row_shapes), *shared_shapes]
    generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
    inputs = tuple(torch.randn(s, generator=generator, dtype=torch.float64) * 0.7 for s in shapes)
    extra = {"collect": rng.random() < 0.5, "index": rng.random() < 0.3}
    keyed, nested, closes = (rng.random() < p for p in (0.25, 0.15, 0.4))
    steps = [_step(rng) for _ in range(rng.randint(1, 4))]
    order = rng.sample(range(carries), carries)

    def block(rows: Any, x: Any, *shared: torch.Tensor, **given: torch.Tensor) -> Any:
        values = [*x, *(_shaped(row) for row in rows), *(_shaped(s) for s in shared)]
        if "index" in given:
            values.append(torch.ones(2, 3, dtype=torch.float64) * given["index"])
        if "key" in given:
            values.append(random.normal(given["key"], (2, 3), dtype=torch.float64))
        for step in steps:
            values.append(_mixed(step(values), rows))
        new = [values[-1], *x[1:]] if carries == 1 else [values[-1], x[0] + values[-1] / 2]
        carried = tuple(new[k] for k in order)
        return (
            (carried, {"last": values[-1], "sum": values[-1].sum(), "entered": x[0]})
            if extra["collect"]
            else carried
        )

    def fn(*xs: torch.Tensor) -> Tensors:
        x, rows = xs[:carries], xs[carries : carries + len(row_shapes)]
        shared = xs[carries + len(row_shapes) :]
        options: dict[str, Any] = {**extra, **({"key": random.key(3)} if keyed else {})}
        if closes and shared:
            inner, rest = (lambda r, x, **k: block(r, x, *shared, **k)), ()
        else:
            inner, rest = block, shared
        if nested:
            twice = [[row, row] if isinstance(row, list) else torch.stack([row, row]) for row in rows]
            out = repeat(
                lambda r, x: (
                    repeat(inner, r, x, *rest, **{**options, "collect": False})
                    if not extra["collect"]
                    else repeat(inner, r, x, *rest, **options)[0]
                ),
                twice,
                x,
            )
            return tuple(out)
        out = repeat(inner, rows, x, *rest, **options)
        if extra["collect"]:
            return (*out[0], *tree.leaves(out[1]))
        return tuple(out)

    said = [s.__name__ for s in steps]
    text = f"loop({count}, {carries}, {row_shapes}, {shared_shapes}, {extra}, {said}"
    stacked = [carries <= i < carries + len(row_shapes) for i in range(len(inputs))]
    return (f"{text}, keyed={keyed}, nested={nested}, closes={closes})", fn, inputs), stacked


def _shaped(x: torch.Tensor) -> torch.Tensor:
    """An operand as a [2, 3] tensor."""
    return x[:2] if x.shape == (3, 3) else x.expand(2, 3)


def _mixed(x: torch.Tensor, rows: Any) -> torch.Tensor:
    """Products keep what a row is needed for."""
    for row in rows:
        if row.shape == (3, 3):
            return x @ row / 2
    return x


def _step(rng: Random) -> Step:
    if rng.random() < 0.6:
        what = rng.choice(sorted(UNARY))
        pick = rng.random()

        def unary(values: list[torch.Tensor]) -> torch.Tensor:
            return UNARY[what](values[int(pick * len(values))])

        unary.__name__ = what
        return unary
    what = rng.choice(sorted(BINARY))
    first, second = rng.random(), rng.random()

    def binary(values: list[torch.Tensor]) -> torch.Tensor:
        return BINARY[what](values[int(first * len(values))], values[int(second * len(values))])

    binary.__name__ = what
    return binary


def main() -> None:
    warnings.simplefilter("ignore")
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found: Counter[str] = Counter()
    equal_layers.MIN_SAVED = 1
    for seed in range(first, first + count):
        for source in (random_loop, random_layers):
            case = draw(seed, [source])
            verdict = judge(case)
            found[f"{source.__name__} {verdict.kind}"] += 1
            if verdict.kind in (WRONG, FAILED):
                print(f"{case}: {verdict.kind}, {verdict.why}", flush=True)
    print(dict(found))


if __name__ == "__main__":
    main()
