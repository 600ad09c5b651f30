"""Large results lie in memory that was asked for in huge pages, and are what they would be elsewhere."""

from __future__ import annotations

import mmap
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import fuse, trace
from torchard.kernels import buffers
from torchard.kernels.buffers import Buffers
from torchard.kernels.compiled import compiled

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where pages were asked for, and how many bytes; all results are large."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(buffers, "_advise", lambda: lambda *range_: seen.append(range_))
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
    """By blocks or compiled: whichever is faster, no page is touched before it is asked for."""
    x, b = torch.randn(1 << 10, 1 << 11), torch.randn(1 << 11)
    fused = fuse(lambda x, b: F.gelu(x + b))
    fused(x, b)
    how = str(fused.lower(x, b).kernels[0].how)
    asked.clear()
    out = fused(x, b)
    torch.testing.assert_close(out, F.gelu(x + b))
    if not how.startswith("eager"):
        ((start, _),) = asked
        assert out.data_ptr() <= start < out.data_ptr() + mmap.PAGESIZE
