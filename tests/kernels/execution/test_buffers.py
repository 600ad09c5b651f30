"""Large results lie in memory that was asked for in huge pages, and are what they would be elsewhere."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor

from torchard import trace
from torchard.functional import torch_internals as internals
from torchard.functional.memory import huge_pages
from torchard.functional.torch_internals.accessors import tensors
from torchard.kernels.execution import buffers
from torchard.kernels.execution.buffers import Buffers
from torchard.kernels.execution.compiled import compiled
from torchard.kernels.execution.pool import Pool

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where pages were asked for, and how many bytes; all results are large."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(buffers, "_pool", Pool(1 << 30))
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *range_: seen.append(range_))
    return seen


def test_whole_pages_inside_are_asked_for(asked: list[tuple[int, int]]) -> None:
    like = torch.empty(3 * mmap.PAGESIZE + 7, dtype=torch.uint8)
    (made,) = Buffers.of([like]).new(CPU)
    ((start, length),) = asked
    assert start % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0
    assert made.data_ptr() <= start < made.data_ptr() + mmap.PAGESIZE
    assert start + length <= made.data_ptr() + made.nbytes
    assert length >= 2 * mmap.PAGESIZE


def test_small_ones_are_not_asked_for(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1 << 22)
    Buffers.of([torch.empty(1 << 10)]).new(CPU)
    assert not asked


def test_the_system_is_asked_and_may_refuse() -> None:
    """Whatever it answers, the memory is there."""
    like = torch.empty(buffers.LARGE, dtype=torch.uint8)
    (made,) = Buffers.of([like]).new(CPU)
    assert int(made.fill_(3).sum(dtype=torch.int64)) == 3 * buffers.LARGE


def test_where_there_are_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    huge_pages._advise.cache_clear()
    test_the_system_is_asked_and_may_refuse()
    assert huge_pages._advise() is None
    huge_pages._advise.cache_clear()


def test_they_are_laid_out_as_what_they_are_for(asked: list[tuple[int, int]]) -> None:
    like = torch.empty(4, 6, dtype=torch.bfloat16).t()
    (made,) = Buffers.of([like]).new(CPU)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert Buffers.of([like]).dense
    assert not Buffers.of([torch.empty(4, 1).expand(4, 6)]).dense
    assert not Buffers.of([torch.empty(4, 12)[:, ::2]]).dense


def gelus(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + b
    return F.gelu(h), h * h.sum(-1, keepdim=True)


def test_compiled_results_are_written_there_and_new(asked: list[tuple[int, int]]) -> None:
    x, b = torch.randn(64, 48), torch.randn(48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the compiler warns about torch.jit
        run = compiled(trace(gelus)(x, b), [x, b])
    buffers.release()
    asked.clear()
    first, again = run([x, b]), run([x, b])
    assert len(asked) == 4
    torch.testing.assert_close(tuple(first), gelus(x, b))
    torch.testing.assert_close(tuple(again), gelus(x, b))
    assert len({t.data_ptr() for t in (*first, *again)}) == 4


@pytest.mark.parametrize("fn", [lambda x, w: x @ w, lambda x, w: (x + w).expand(2, *x.shape)])
def test_what_is_not_written_in_place_is_left_to_the_compiler(
    fn: object, asked: list[tuple[int, int]]
) -> None:
    """A product would be copied there; what is expanded has fewer places than elements."""
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = compiled(trace(fn)(x, w), [x, w])  # type: ignore[arg-type]
    torch.testing.assert_close(run([x, w])[0], fn(x, w))  # type: ignore[operator]
    assert not asked


def test_what_fuse_returns_is_there(asked: list[tuple[int, int]]) -> None:
    """By blocks or compiled, whichever is faster: in memory that was used before, if nobody has it."""
    x, b = torch.randn(1 << 10, 1 << 11), torch.randn(1 << 11)
    fused = fuse(lambda x, b: F.gelu(x + b))
    held = [fused(x, b) for _ in range(3)]
    how = str(fused.lower(x, b).kernels[0].how)
    if how.startswith("eager"):
        return
    before = {t.data_ptr() for t in held}
    assert len(before) == 3
    del held[1]
    asked.clear()
    out = fused(x, b)
    assert not asked and out.data_ptr() in before - {t.data_ptr() for t in held}
    for value in (*held, out):
        torch.testing.assert_close(value, F.gelu(x + b))


# -- memory that is used again --------------------------------------------------------------------

SIZE = 1 << 13
LIKE = torch.empty(SIZE // 4)


def taken(like: Tensor = LIKE) -> Tensor:
    return Buffers.of([like]).new(CPU)[0]


def test_what_nobody_has_is_used_again(asked: list[tuple[int, int]]) -> None:
    first = taken()
    place = first.data_ptr()
    assert taken().data_ptr() != place
    del first
    again = taken(torch.empty(32, SIZE // 64 // 4 * 2, dtype=torch.float32).t())
    assert again.data_ptr() == place and again.stride() == (1, SIZE // 128)
    assert not again.requires_grad and again._base is None


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda t: t.view(-1, 2)[3:],
    "a detached one": lambda t: t.detach(),
    "its data": lambda t: t.data,
    "its storage": lambda t: t.untyped_storage(),
    "an array": lambda t: t.numpy(),
    "by dlpack": lambda t: torch.from_dlpack(t),
    "a graph": lambda t: (torch.ones(t.shape, requires_grad=True) * t).sum(),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "a weak map's value": lambda t: {"x": [t]},
}


@pytest.mark.parametrize("how", HOLDERS)
def test_what_somebody_has_is_not(how: str, asked: list[tuple[int, int]]) -> None:
    value = taken().fill_(1)
    place, held = value.data_ptr(), HOLDERS[how](value)
    del value
    assert taken().fill_(7).data_ptr() != place
    del held
    assert taken().data_ptr() == place


def test_what_others_share_or_have_resized_is_not(asked: list[tuple[int, int]]) -> None:
    resized = taken()
    resized.untyped_storage().resize_(2 * SIZE)
    place = resized.data_ptr()
    del resized
    assert taken().data_ptr() != place
    buffers.release()
    shared = taken().share_memory_()
    place = shared.data_ptr()
    del shared
    assert taken().data_ptr() != place


@pytest.mark.parametrize("factor, again", [(0.5, False), (0.85, True), (1.0, True), (1.1, False)])
def test_of_about_the_same_size(factor: float, again: bool, asked: list[tuple[int, int]]) -> None:
    first = taken()
    place = first.data_ptr()
    del first
    other = taken(torch.empty(int(factor * SIZE), dtype=torch.uint8))
    assert (other.data_ptr() == place) == again


def test_so_much_is_kept(monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, int]]) -> None:
    """Beyond, what has not been used for longest is let go of; what is in use is its users'."""
    monkeypatch.setattr(buffers, "_pool", Pool(2 * SIZE))
    held = [taken().fill_(i) for i in range(4)]
    assert [int(t[0]) for t in held] == [0, 1, 2, 3]
    places = [t.data_ptr() for t in held]
    asked.clear()
    held.clear()
    kept = [taken(), taken()]
    assert not asked and [t.data_ptr() for t in kept] == places[2:]
    buffers.release()
    del kept
    taken()
    assert len(asked) == 1


def test_without_torch_s_count_nothing_is_used_again(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(internals, "storage_uses", tensors._unknown)
    for number in range(3):
        taken()
        assert len(asked) == number + 1


def test_threads_never_share(asked: list[tuple[int, int]]) -> None:
    def work(number: int) -> bool:
        right = []
        for _ in range(200):
            mine = taken().fill_(number)
            right.append(bool((mine == number).all()))
        return all(right)

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(work, range(4)))


def test_search_for_free_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks that are kept cost a take a few looks, and those that come free are found."""
    looks: list[int] = []
    pool = Pool(1 << 30)
    kind: Any = type(pool._added(1))
    is_free = kind.is_free
    monkeypatch.setattr(kind, "is_free", lambda self: looks.append(1) or is_free(self))

    def taken() -> Tensor:
        return pool.empty((64, 64), (64, 1), torch.float32, 1 << 14)

    kept = [taken() for _ in range(1000)]
    looks.clear()
    places = set()
    for _ in range(1000):
        places.add(taken().data_ptr())
    assert len(looks) < 12 * 1000
    assert len(places) <= 1000 // 4 + 1  # until all are looked at again
    del kept
