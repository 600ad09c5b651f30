"""Decoders with donated caches: the tokens of plain torch, which writes into its caches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoding import SIZE, WAYS, Copies, copies, decoded, decoders, in_place
from new_memory import PAGE
from torch import Tensor

from torchard import jit, tree

PARAMS = decoders.params(SIZE)
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


@ways
def test_tokens_and_caches(options: dict[str, Any]) -> None:
    wanted, kept = decoded(decoders.plain(SIZE), PARAMS, decoders.caches(SIZE))
    run = jit(decoders.pure(SIZE), donate_argnums=1, **options)
    tokens, caches = decoded(run, PARAMS, decoders.caches(SIZE))
    assert torch.equal(tokens, wanted) and len(set(tokens.tolist())) > 2
    for have, want in zip(caches, kept, strict=True):
        torch.testing.assert_close(have, want)


@ways
def test_caches_that_are_not_donated_are_unchanged(options: dict[str, Any]) -> None:
    run, held = jit(decoders.pure(SIZE), **options), decoders.caches(SIZE)
    wanted, _ = decoded(decoders.plain(SIZE), PARAMS, decoders.caches(SIZE))
    for _ in range(2):
        assert torch.equal(decoded(run, PARAMS, held)[0], wanted)
    assert not any(cache.any() for pair in held for cache in pair)


@ways
def test_huggingface(options: dict[str, Any]) -> None:
    """Its static cache writes into clones of the arguments."""
    pytest.importorskip("transformers")
    module, pure, params = decoders.hugging_face(SIZE)
    wanted, _ = decoded(decoders.in_place(module, SIZE), None, None)
    run = jit(pure, donate_argnums=1, **options)
    assert torch.equal(decoded(run, params, decoders.caches(SIZE))[0], wanted)


def test_copies_are_counted() -> None:
    """In place there are none; a pure step without jit copies each of the four caches."""
    empty = functools.partial(decoders.caches, SIZE)
    assert copies(decoders.plain(SIZE), PARAMS, empty) == in_place()
    by_value = copies(decoders.pure(SIZE), PARAMS, empty)
    assert by_value == Copies(4, [SIZE.cache_bytes] * 4, [0] * 4)


def test_written_pages_are_counted() -> None:
    """A copy there and back leaves a cache where it was, and writes all of its pages."""

    def step(params: Any, caches: Any, token: Tensor, position: Tensor) -> Any:
        token, new = decoders.pure(SIZE)(params, caches, token, position)
        return token, tree.map(lambda old, value: old.copy_(value), caches, new)

    found = copies(step, PARAMS, functools.partial(decoders.caches, SIZE))
    assert found[:2] == (0, [SIZE.cache_bytes] * 4)
    assert all(pages >= SIZE.cache_bytes // PAGE - 1 for pages in found.pages)
