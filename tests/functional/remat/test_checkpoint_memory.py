"""What checkpoints hold: nested ones the root of it all, random ones what their program says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from _live import LiveBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchard import checkpoint, jit, name, nn, policies, random, scope
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.program import Program

# -- nested -----------------------------------------------------------------------------------------

LAYERS, GROUP, DEPTH, ROWS, WIDTH = 8, 4, 3, 256, 4
VALUE = ROWS * WIDTH * 4


def layer(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(DEPTH):
        x = torch.tanh(x @ w)
    return x


def layers(checkpointed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(ws: Sequence[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = checkpointed(w, x)
        return x

    return run


def groups(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(ws: Sequence[Tensor], x: Tensor) -> Tensor:
        for i in range(0, LAYERS, GROUP):
            x = run(ws[i : i + GROUP], x)
        return x.sum()

    return loss


WEIGHTS, X = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)], torch.randn(ROWS, WIDTH)
NESTINGS = {
    "none": groups(layers(layer)),
    "inner": groups(layers(checkpoint(layer))),
    "outer": groups(checkpoint(layers(layer))),
    "both": groups(checkpoint(layers(checkpoint(layer)))),
}


def joint(fn: Callable[..., Tensor]) -> Program:
    return jit(fn, backend="eager").lower_joint(WEIGHTS, X)


def kept(program: Program) -> int:
    """Values that a backward keeps, of the forward."""
    return sum(one.kind == "value" for one in program.residuals)


def again(program: Program) -> int:
    """Products made again."""
    return sum(op_name(n) == "aten.mm" and "recompute" in n.meta for n in program.calls)


def test_nested_checkpoints_keep_less_than_either() -> None:
    """Of 2 × 4 layers: the start of each group, then of each layer in one, then all of one layer.

    Where the last layer of a group starts is known only once the others have run again; its own
    values are made for the backward alone.
    """
    found = {kind: joint(fn) for kind, fn in NESTINGS.items()}
    starts_of_groups, starts_of_layers = LAYERS // GROUP - 1, LAYERS - 1
    assert {kind: kept(program) for kind, program in found.items()} == {
        "none": LAYERS * DEPTH,
        "inner": starts_of_layers,
        "outer": starts_of_groups,
        "both": starts_of_groups,
    }
    whole = LAYERS * DEPTH
    handed_on = (GROUP - 1) * (LAYERS // GROUP) * DEPTH
    assert {kind: again(program) for kind, program in found.items()} == {
        "none": 0,
        "inner": whole,
        "outer": whole,
        "both": handed_on + whole,
    }
    # Besides x and the weights: what is kept, what is made again and a cotangent with the next.
    least = X.nbytes + sum(w.nbytes for w in WEIGHTS)
    beside = {kind: (program.peak - least) // VALUE for kind, program in found.items()}
    assert beside["inner"] <= starts_of_layers + DEPTH + 2
    assert beside["outer"] <= starts_of_groups + GROUP * DEPTH + 2
    assert beside["both"] <= starts_of_groups + (GROUP - 1) + DEPTH + 2
    assert beside["both"] < min(beside["inner"], beside["outer"])
    assert max(beside["inner"], beside["outer"]) < beside["none"]


@pytest.mark.parametrize("kind", ["inner", "both"])
def test_nested_checkpoints_really_hold_that(kind: str) -> None:
    program = joint(NESTINGS[kind])
    assert measured(jit(NESTINGS[kind], backend="eager"), WEIGHTS, X) == program.peak


def test_a_checkpoint_of_checkpoints_keeps_what_the_inner_one_says() -> None:
    """The outer one's backward makes the labelled value once; the inner one's reads that."""

    def mlp(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(name(torch.sin(x @ w), "mid") @ w)

    def products(inner: Any) -> int:
        run = checkpoint(layers(checkpoint(mlp, policy=inner)))
        return again(joint(lambda ws, x: run(ws, x).sum()))

    handed_on = 2 * (LAYERS - 1)
    assert products(policies.save_nothing) == handed_on + 2 * LAYERS
    # Of the last layer nothing is needed but by its own backward.
    assert products(policies.save_names("mid")) == handed_on + 1 + LAYERS + LAYERS


# -- random -----------------------------------------------------------------------------------------

SHAPE = (6, 4)
OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b, w: a.sin(),
    "tanh": lambda a, b, w: a.tanh(),
    "mul": lambda a, b, w: a * b,
    "add": lambda a, b, w: a + b,
    "mm": lambda a, b, w: a @ w,
    "softmax": lambda a, b, w: a.softmax(-1),
    "norm": lambda a, b, w: nn.layer_norm(a, w[0], w[1]),
    "views": lambda a, b, w: torch.cat([t.exp() for t in b.chunk(2, -1)], -1) * 0.1 + a,
    "turned": lambda a, b, w: (a.T.cos() @ b @ w.T.reshape(4, 4)).sum(0) + a,
    "gelu": lambda a, b, w: nn.gelu(a, "tanh"),
    "dropped": lambda a, b, w: nn.dropout(random.key(3), a, 0.3),
    "max": lambda a, b, w: a + b.max(0, keepdim=True).values,
}


@dataclass
class Step:
    """One operation on two of the values so far, or a checkpoint around several; what it gives is one."""

    op: str
    operands: tuple[int, int]
    label: str | None
    scope: str
    steps: tuple[Step, ...] = ()
    policy: Any = None

    def __call__(self, values: Sequence[Tensor], w: Tensor, checkpointed: bool) -> Tensor:
        with scope(self.scope):
            if not self.steps:
                a, b = (values[i % len(values)] for i in self.operands)
                made = OPS[self.op](a, b, w)
                return name(made, self.label) if self.label else made

            def run(values: Sequence[Tensor], w: Tensor) -> Tensor:
                return follow(self.steps, values, w, checkpointed)

            inner = checkpoint(run, policy=self.policy) if checkpointed else run
            return inner(list(values), w)


def follow(
    steps: Sequence[Step], values: Sequence[Tensor], w: Tensor, checkpointed: bool
) -> Tensor:
    now = [*values]
    for one in steps:
        now.append(one(now, w, checkpointed))
    return now[-1]


def any_policy(rng: Random) -> Any:
    """A named one, or an answer of its own for each operation, scope and name."""
    if rng.random() < 0.3:
        return rng.choice([policies.save_nothing, policies.save_dots, policies.save_everything])
    seed = rng.random()

    def at_random(op: str, shapes: Any, scope: str, name: str | None) -> Any:
        answers = ["save", "recompute", "recompute", "offload"]
        return Random(f"{seed} {op} {shapes.result} {scope} {name}").choice(answers)

    return at_random


def any_steps(rng: Random, count: int, depth: int) -> tuple[Step, ...]:
    found = []
    for _ in range(count):
        nested = (
            any_steps(rng, rng.randint(1, 4), depth - 1) if depth and rng.random() < 0.4 else ()
        )
        # The latest values most of all, so that chains are long; others make diamonds.
        operands = -1 if rng.random() < 0.7 else rng.randint(0, 9), rng.randint(0, 9)
        label = rng.choice([None, None, "a", "b"])
        at = rng.choice(["", "x", "y"])
        found.append(
            Step(
                rng.choice([*OPS]), operands, label, at, nested, any_policy(rng) if nested else None
            )
        )
    return tuple(found)


def measured(fn: Any, *args: Any) -> int:
    """The most bytes alive during the forward and the backward of fn by all of its arguments."""
    flat, tree = tree_flatten(args)
    leaves = [t.detach().clone().requires_grad_() for t in flat]
    one = torch.ones((), dtype=leaves[0].dtype)

    def run() -> None:
        value = fn(*tree_unflatten(leaves, tree))
        torch.autograd.grad(value, leaves, one, allow_unused=True)

    run()
    gc.collect()
    with LiveBytes([*leaves, one]) as count:
        run()
    return count.peak()


@settings(max_examples=12 if settings.get_current_profile_name() == "ci" else 500)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_random_programs(seed: int, length: int) -> None:
    """Gradients to the bit, and no byte more or less than the program says."""
    rng = Random(seed)
    steps = any_steps(rng, length, 2)
    outer = any_policy(rng)
    x = random.normal(random.key(seed % 99), SHAPE)
    w = random.normal(random.key(1), (4, 4))

    def loss(x: Tensor, w: Tensor, checkpointed: bool = True) -> Tensor:
        return (follow(steps, [x, x.cos()], w, checkpointed) * 0.5).square().sum()

    made = checkpoint(loss, policy=outer) if rng.random() < 0.5 else jit(loss, backend="eager")
    want = torch.func.grad(jit(partial(loss, checkpointed=False), backend="eager"), (0, 1))(x, w)
    assert all(map(torch.equal, torch.func.grad(made, (0, 1))(x, w), want))
    assert measured(made, x, w) == made.lower_joint(x, w).peak

    def step(x: Tensor, w: Tensor) -> Any:
        return torch.func.grad(made, (0, 1))(x, w)

    run = jit(step, backend="eager")
    assert all(map(torch.equal, run(x, w), want))
    with LiveBytes([x, w]) as count:
        run(x, w)
    assert count.peak() == run.lower(x, w).peak
