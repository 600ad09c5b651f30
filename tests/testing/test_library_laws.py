"""The laws of the library itself: every word over its transforms and torch's, on five models.

A word is a stack, written from the inside out. Each equals the same derivations of the plain function, or
is refused by one of the library's own errors. `make test` takes a fixed part of the words, `make laws`
ten times as many (all of them: ``make laws ARGS="--every 1"``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import examples
from library_laws import MESHES, MODELS, outcome, words

from torchard import P, checkpoint, jit, shard
from torchard.functional.core import tree
from torchard.testing import equal


@pytest.mark.parametrize("model", MODELS)
def test_every_word_equals_the_plain_function(model: str) -> None:
    for number, word in enumerate(words(model, examples(ci=1400, explore=70))):
        outcome(model, word, number)


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
