"""The laws of the library itself: every word over its transforms and torch's, on five models.

A word is a stack, written from the inside out. Each equals the same derivations of the plain function, or
is refused by one of the library's own errors. `make test` takes a fixed part of the words, `make laws`
ten times as many; ``LAWS=all`` takes them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from effort import examples
from refusals import refuses
from torch.nn import functional as F

from torchard import Mesh, P, checkpoint, fuse, jit, random, shard
from torchard.functional.core import tree
from torchard.testing import check_stack, equal

LETTERS = ("shard", "fuse", "checkpoint", "jit", "grad", "vmap", "jvp")
WORDS = [word for n in range(1, 5) for word in product(LETTERS, repeat=n)]
MESHES = [Mesh(axes, virtual=True) for axes in ({"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3})]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return random.normal(random.key(seed), shape, dtype=torch.float64) * 0.5


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ p["up"] + p["bias"], approximate="tanh") @ p["down"]


def attention(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    return (q @ k.mT / 2).softmax(-1) @ v @ p["out"]


def conv_net(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(torch.tanh(F.conv2d(x, p["kernel"], p["bias"], padding=1)), 2).sum((2, 3))


def gpt_layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = x + attention(p, F.layer_norm(x, x.shape[-1:], p["gain"]))
    return h + mlp(p, F.layer_norm(h, h.shape[-1:], p["gain"]))


def recurrence(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Rows that are written in place, read through detach, summed and compared."""
    h = x.clone()
    for row in range(h.shape[0] - 1):
        h[row + 1] = torch.tanh(h[row].detach() + x[row + 1] @ p["w"])
    return h.cumsum(0).flip(0) * h.amax(0)


MLP = {"up": draw(1, 4, 6), "bias": draw(2, 6), "down": draw(3, 6, 4)}
ATTENTION = {"qkv": draw(4, 4, 12), "out": draw(5, 4, 4)}
Model = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
MODELS: dict[str, Model] = {
    "mlp": (mlp, (MLP, draw(6, 5, 4))),
    "attention": (attention, (ATTENTION, draw(7, 6, 4))),
    "conv net": (conv_net, ({"kernel": draw(8, 3, 2, 3, 3), "bias": draw(9, 3)}, draw(10, 2, 2, 4, 4))),
    "gpt layer": (gpt_layer, ({**MLP, **ATTENTION, "gain": draw(11, 4)}, draw(12, 6, 4))),
    "recurrence": (recurrence, ({"w": draw(13, 4, 4)}, draw(14, 3, 4))),
}


def words(first: int) -> list[tuple[str, ...]]:
    """The words of one model: spread over all lengths, others for each model."""
    if os.environ.get("LAWS") == "all":
        return WORDS
    return WORDS[first :: examples(ci=700, explore=70)]


@pytest.mark.parametrize("model", MODELS)
def test_every_word_equals_the_plain_function(model: str) -> None:
    fn, args = MODELS[model]
    index = list(MODELS).index(model)
    for i, word in enumerate(words(61 * index)):
        try:
            check_stack(fn, [word], *args, mesh=MESHES[(i + index) % len(MESHES)])
        except Exception as error:
            if isinstance(error, AssertionError) or not refuses(error):
                raise


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "shard": lambda fn: shard(fn, MESHES[0], (P(), P("tp"))),
    "fuse": fuse,
    "checkpoint": checkpoint,
    "jit": lambda fn: jit(fn, backend="eager"),
}


def _costs(fn: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a plan costs: collectives, residual bytes, kernels."""
    lowered = fn.lower_joint(*args)
    collectives = sorted((c.kind, c.axes, c.bytes) for c in lowered.collectives)
    return collectives, lowered.residuals.bytes, sorted(use.kernel for use in lowered.kernels)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("model", ["mlp", "gpt layer"])
def test_a_transform_of_itself_changes_nothing(model: str, transform: str) -> None:
    """Idempotence: values, collectives, residual bytes and kernels."""
    fn, args = MODELS[model]
    once, twice = TRANSFORMS[transform](fn), TRANSFORMS[transform](TRANSFORMS[transform](fn))
    assert _costs(once, args) == _costs(twice, args)
    equal(twice, fn, *args, orders=["value", "gradient"])


@pytest.mark.parametrize("pair", [("shard", "fuse"), ("shard", "checkpoint"), ("fuse", "checkpoint")])
@pytest.mark.parametrize("model", ["mlp", "gpt layer"])
def test_transforms_commute(model: str, pair: tuple[str, str]) -> None:
    """Values, collectives, residual bytes and kernels."""
    fn, args = MODELS[model]
    one, other = (TRANSFORMS[name] for name in pair)
    assert _costs(one(other(fn)), args) == _costs(other(one(fn)), args)


@pytest.mark.parametrize("word", [("shard", "checkpoint"), ("fuse", "shard", "jit")], ids=str)
def test_the_same_mesh_gives_the_same_bits_without_a_second_trace(word: tuple[str, ...]) -> None:
    fn, args = MODELS["gpt layer"]
    stack: Any = fn
    for name in word:
        stack = TRANSFORMS[name](stack)
    first = tree.leaves(tree.whole(stack(*args)))
    again = tree.leaves(tree.whole(stack(*args)))
    assert all(map(torch.equal, first, again)) and stack.traces == 1
