"""Donated caches that compiled programs write: what else holds them is unchanged, and none is copied.

Whether a large cache is copied is counted in pages of memory that a call touches first.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_writes import RandomWrites, compiled_writes
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import HOLDERS, cloned, same, tensor_of
from torch import Tensor
from written_caches import AT, cache, kv, new, places, swapped

from torchard import jit, repeat
from torchard.functional.compiling import writes_in_place


def written(c: Tensor, k: Tensor) -> Tensor:
    return c.index_copy(1, AT, k)


# -- what others hold --------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_cache_that_others_hold(holder: str, first: int) -> None:
    """At the first call, which is compiled for it, or at a later one: a copy is written into."""
    run = jit(written, donate_argnums=0)
    for _ in range(first):
        run(kv().float(), new().float())
    for _ in range(2):
        c, want = kv().float(), written(kv(), new()).float()
        held = HOLDERS[holder](c)
        assert torch.equal(run(c, new().float()), want)
        if held is not c:  # which may not be used
            rest = tensor_of(held)
            assert torch.equal(rest, kv().float()[: len(rest)])


def test_a_cache_that_is_a_part_of_another() -> None:
    """Two caches in one memory, donated both or one of them."""
    for numbers in ((0, 1), (0,)):
        run = jit(swapped, donate_argnums=numbers)
        for _ in range(3):
            whole = cache(4, 8, 4)
            want = swapped(whole[:2].clone(), whole[2:].clone(), new())
            assert same(run(whole[:2], whole[2:], new()), want)
            assert torch.equal(whole, cache(4, 8, 4))


def test_results_of_an_earlier_call() -> None:
    """What a call returned stays while something else holds a view of it."""
    run = jit(written, donate_argnums=0)
    first = run(kv(), new())
    view, kept = first[1], first[1].clone()
    run(first, new() * 2)
    assert torch.equal(view, kept)


def shares(values: Any) -> list[bool]:
    storages = [x.untyped_storage().data_ptr() for x in values]
    return [one == other for one in storages for other in storages]


@settings(max_examples=examples(ci=4, explore=150), deadline=None)
@given(
    compiled_writes(),
    st.sampled_from([(0,), (1,), (0, 1)]),
    st.sets(st.integers(0, 1)),
    st.sampled_from([1, writes_in_place.MIN_WRITES]),
)
def test_compiled_writes(
    program: RandomWrites, numbers: tuple[int, ...], held: set[int], least: int
) -> None:
    """Values are right, what is held by views stays, and no results share memory that should not.

    Small values are written to one by one, too, which compiled code does for large ones only.
    """
    run = jit(program, donate_argnums=numbers)
    with mock.patch.multiple(writes_in_place, MIN_WRITES=least, MIN_BYTES={"cpu": 0}):
        run(cache(3, 4, 6), cache(3, 4, 6))
    for holding in (set(), held):
        inputs = [cache(3, 4, 6), cache(3, 4, 6).flip(0) + 1]
        want = program(*cloned(inputs))
        views = [inputs[i].view(-1) for i in holding]
        others = [inputs[i] for i in (0, 1) if i not in numbers]
        before = cloned([views, others])
        alike = shares(jit(program, backend="eager")(*cloned(inputs)))
        have = run(*inputs)
        assert same(have, want) and same([views, others], before)
        assert all(one <= other for one, other in zip(shares(have), alike, strict=True))


# -- nothing is copied -------------------------------------------------------------------------------

LONG = 1 << 17


def layers(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A write into each layer of a cache of several."""

    def fn(c: Tensor, k: Tensor) -> Tensor:
        c = c.clone()
        for layer in range(len(c)):
            write(c[layer], k * layer)
        return c

    return fn


def untouched(*shape: int) -> Tensor:
    """Memory of which the system has given no page yet: 256 MB."""
    return torch.empty(*shape)


def pages(call: Callable[[], Any]) -> int:
    """How many pages are touched first."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


LARGE: dict[str, tuple[Callable[..., Any], int]] = {
    "one": (lambda c, k: c.index_copy(1, AT, k), 1),
    "two": (swapped, 2),
    "layers by index": (layers(lambda c, k: c.index_copy_(1, AT, k)), 1),
    "layers by slices": (layers(lambda c, k: c[:, 5:6].copy_(k)), 1),
    "layers by tensors": (layers(lambda c, k: c.__setitem__((slice(None), AT), k)), 1),
    "of constants": (lambda c, k: c.index_put((torch.tensor([0, 1]), AT), k[:, 0]), 1),
    "a row is read later": (lambda c, k: (c.index_copy(1, AT, k), c[:, 7] + 1), 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_caches_are_not_copied(name: str) -> None:
    """A call touches a few pages; a copy would touch all (at least one in 2 MB, if these are huge)."""
    fn, count = LARGE[name]
    run, k = jit(fn, donate_argnums=tuple(range(count))), torch.ones(2, 1, 64)
    shape = (4, 2, LONG // 4, 64) if "layers" in name else (2, LONG, 64)
    run(*(untouched(*shape) for _ in range(count)), k)
    held = [untouched(*shape) for _ in range(count)]
    found = places(held)

    def call() -> None:
        donated = [held.pop(0) for _ in range(count)]
        out = run(donated.pop(0), *(donated.pop(0) for _ in range(count - 1)), k)
        held.extend(out if isinstance(out, tuple) else [out])

    assert pages(call) < 64
    assert set(places(held)) >= set(found)


# -- loops -------------------------------------------------------------------------------------------


def tokens(c: Tensor, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A cache that is written and read for each of some tokens."""

    def token(at: Tensor, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        c, x = carry
        c = c.index_copy(1, at.view(1), x[:, None])
        return c, (x + c.sum(1)) % 5

    c, x = repeat(token, torch.arange(count), (c, x))
    return c, x


def test_a_cache_that_iterations_pass_on_stays_where_it_is() -> None:
    run, c, x = jit(lambda c, x: tokens(c, x, 6), donate_argnums=0), kv(), kv()[:, 0].clone()
    place = c.data_ptr()
    for _ in range(3):
        want = tokens(c.clone(), x, 6)
        c, x = run(c, x)
        assert same((c, x), want) and c.data_ptr() == place


@pytest.mark.parametrize("donated", [False, True])
def test_a_cache_of_a_loop_that_others_hold(donated: bool) -> None:
    """The first iteration writes into a copy; the others into what the one before has returned."""
    run = jit(lambda c, x: tokens(c, x, 6), donate_argnums=(0,) if donated else ())
    for _ in range(3):
        c, x = kv(), kv()[:, 0].clone()
        view = c[1:]
        assert same(run(c, x), tokens(kv(), x, 6))
        assert torch.equal(view, kv()[1:])


def test_caches_that_a_loop_returns_row_by_row() -> None:
    """Of each iteration: none is written over by the next."""

    def fn(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def token(at: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            c = c.index_copy(1, at.view(1), x[:, None] + at)
            return c, c

        return repeat(token, torch.arange(4), c, collect=True)

    run, x = jit(fn, donate_argnums=0), kv()[:, 0].clone()
    for _ in range(3):
        assert same(run(kv(), x), fn(kv(), x))
