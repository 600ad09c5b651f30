"""Writes, views and stops of gradients × transforms × where the gradient is taken, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from effect_programs import Stop, program
from effect_ways import (
    MESH,
    STACKS,
    Fn,
    backward,
    differences,
    quiet,
)
from effort import examples
from torch.func import grad, vmap

from torchard import checkpoint, shard
from torchard.functional.core.errors import PurityError

FURTHER = ("jvp", "vmap of grad", "gradient of vmap", "second")


def search(seeds: range) -> tuple[int, list[str]]:
    """How many programs torch itself differentiates, and what is wrong with them under a transform.

    Each is run under one stack; its gradient is taken in every way, and one further derivative.
    """
    count, found = 0, []
    for seed in seeds:
        fn, x = program(seed, 4 + seed % 5)
        try:
            backward(fn, x)
        except RuntimeError:
            continue
        count += 1
        stack = list(STACKS)[seed % len(STACKS)]
        names = ("value", "gradient", FURTHER[seed % len(FURTHER)])
        found += [f"{seed} {stack}: {line}{fn}" for line in differences(fn, x, stack, names)]
    return count, found


@quiet
def test_random_programs_of_writes_views_and_stops() -> None:
    count, found = search(range(examples(ci=7, explore=2600)))
    assert not found, "\n".join(found)
    assert count > 2000 or count >= 5


ROWS: dict[str, Callable[[torch.Tensor], object]] = {
    "an element": lambda y: y.__setitem__((0, -1), 1),
    "a row": lambda y: y.__setitem__(-1, y[0] * 2),
    "a column": lambda y: y[:, 1].mul_(y[:, 0]),
    "of a permuted value": lambda y: y.t()[1].copy_(y[0].sin()),
}


@quiet
@pytest.mark.parametrize("write", ROWS)
def test_gradients_of_a_batch_in_which_one_row_is_written(write: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ROWS[write](y)
        return (y * x).sum()

    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for stack in STACKS:
        assert not differences(fn, x, stack, ("gradient of vmap",)), stack


STOPPED: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda y: y.add_(1),
    "mul_": lambda y: y.mul_(3),
    "clamp_": lambda y: y.clamp_(min=0.1),
    "sub_": lambda y: y.sub_(2),
    "relu_": lambda y: y.relu_(),
    "y[0] = 0": lambda y: y.__setitem__(0, 0),
    "y += 1": lambda y: y.__iadd__(1),
    "y[y > 0] = 1": lambda y: y.__setitem__(y > 0, 1.0),
    "fill_diagonal_": lambda y: y.fill_diagonal_(0.0),
    "as_strided": lambda y: y.as_strided((2, 2), (5, 2), 1).mul_(3),
    "unfold": lambda y: y.unfold(0, 2, 2)[0].mul_(2),
    "zero_": lambda y: y.zero_(),
    "through detach": lambda y: y.detach().mul_(2),
    "through data": lambda y: y.data[0].mul_(2),
    "out=": lambda y: torch.sin(y.detach(), out=y.data),
}
READ: dict[str, Fn] = {
    "detach": lambda y: y.detach(),
    "data": lambda y: y.data,
    "softmax": lambda y: y.detach().softmax(-1),
    "max": lambda y: y.detach().amax(-1, keepdim=True),
    "Function": Stop.apply,
}


def stopped(write: str, read: str, before: bool) -> Fn:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        stop = READ[read](y) if before else None
        STOPPED[write](y)
        return (y * (READ[read](y) if stop is None else stop)).sum()

    return fn


@pytest.mark.sampled(2)
@quiet
@pytest.mark.parametrize("write", STOPPED)
def test_a_stop_before_or_after_a_write(write: str) -> None:
    """A detached value shares memory with what it was taken of: later writes show, gradients do not."""
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reads = [(read, before) for read in READ for before in (False, True)]
    first = list(STOPPED).index(write)
    for i in range(first, first + len(reads), examples(ci=3, explore=1)):
        (read, before), stack = reads[i % len(reads)], ("checkpoint", "jit")[i // 2 % 2]
        assert not differences(stopped(write, read, before), x, stack, ("value", "gradient")), read


@pytest.mark.parametrize("stack", STACKS)
def test_complex_parts_are_overwritten(stack: str) -> None:
    """Of select_scatter and slice_scatter of complex values torch knows no derivative."""

    def fourier(x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x)
        out = torch.zeros_like(modes)
        out[:, :2] = torch.einsum("bi,io->bo", modes[:, :2], modes[:2, :2])
        out[1] *= 2
        out.real[0].mul_(3)
        out.diagonal().add_(out.conj()[0, :3])
        return torch.fft.irfft(out).square().sum()

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert not differences(fourier, x, stack, ("value", "gradient"))


@quiet
def test_what_a_write_returns_is_what_was_written_to() -> None:
    """Also through strides: the view that a write returns goes on sharing memory with its base."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        v = y.as_strided((2, 3), (1, 4), 2).copy_(x[:2, :3])
        v.mT.add_(1)
        v.mul_(2)
        return (y * y).sum() + v.sin().sum()

    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert not differences(fn, x, "checkpoint", ("value", "gradient", "second"))


def test_assigning_data_is_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.data = y.data * 0
        return y.sum()

    def argument(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data * 0
        return x.sum()

    x = torch.ones(3)
    for fn in (inside, argument):
        for run in (checkpoint(fn), grad(checkpoint(fn)), checkpoint(grad(fn))):
            with pytest.raises(PurityError, match=r"test_effects\.py:\d+ in \w+ assigns to the \.data"):
                run(x)


def test_a_write_without_a_pure_form_is_named() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.resize_(2)
        return y.sum()

    with pytest.raises(PurityError, match=r"test_effects\.py:\d+ in fn writes in place by aten\.resize_"):
        checkpoint(fn)(torch.ones(3))


@quiet
def test_no_grad_writes_pass_gradients_as_if_they_were_not() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        mean, y = torch.zeros(4, dtype=x.dtype), x * 2
        with torch.no_grad():
            mean.mul_(0.9).add_(x.mean(0) * 0.1)
            y[0] = 0.0
        return (y * mean * x).sum()

    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for stack in ("checkpoint", "shard"):
        assert not differences(fn, x, stack, ("value", "gradient", "second")), stack


@pytest.mark.parametrize("stack", ("checkpoint", "jit", "shard"))
def test_an_input_that_no_derivative_needs_may_change_before_the_backward(stack: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 3 * y).sum()

    x, y = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    same: Any = shard(fn, MESH) if stack == "shard" else STACKS[stack](fn)
    for create_graph in (False, True):
        changed = y.clone()
        out = same(x, changed)
        changed.data.sub_(1)
        with torch.no_grad():
            changed.zero_()
        if create_graph:
            with pytest.raises(RuntimeError, match=r"shape \[4, 4\] was changed in place"):
                torch.autograd.grad(out, x, create_graph=True)
        else:
            have = torch.autograd.grad(out, (x, y))
            torch.testing.assert_close(have, (x.cos(), torch.full_like(y, 3)))


@pytest.mark.parametrize("stack", ("checkpoint", "jit", "shard"))
def test_vmap_of_a_memory_format(stack: str) -> None:
    """A layout is of four dims; vmap's fifth has no place in it, and means nothing for the values."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.to(memory_format=torch.channels_last)
        part = x.contiguous(memory_format=torch.channels_last)[:, :, :2, :2]
        return (F.max_pool2d(x, 2) * part + torch.zeros_like(x)[:, :, :2, :2]).sin().sum()

    x = torch.randn(3, 2, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for f in (fn, grad(fn)):
        want = torch.stack([f(one) for one in x])
        torch.testing.assert_close(vmap(STACKS[stack](f))(x), want, rtol=1e-12, atol=1e-12)
    want = torch.stack([grad(fn)(one) for one in x])
    torch.testing.assert_close(vmap(grad(STACKS[stack](fn)))(x), want, rtol=1e-12, atol=1e-12)


# Whether torch's result depends on the order of its loops; where it can tell, it refuses as well.
OVERLAPS: dict[str, tuple[Callable[[torch.Tensor], object], bool]] = {
    "shifted rows": (lambda y: y[:, ::2][1:].copy_(y[:, ::2][:-1]), True),
    "shifted columns": (lambda y: y.mT[1:].copy_(y.mT[:-1]), True),
    "all less the first": (lambda y: y.sub_(y[:, :1]), True),
    "transposed": (lambda y: y[:3, :3].copy_(y[:3, :3].mT), True),
    "windows": (lambda y: y.as_strided((2, 3), (4, 1)).add_(y.as_strided((2, 3), (3, 1), 1)), True),
    "the same": (lambda y: y[1:].add_(y[1:]), False),
    "other columns": (lambda y: y[:, ::2].copy_(y[:, 1::2]), False),
    "other rows": (lambda y: y[0].add_(y[1]), False),
    "a copy": (lambda y: y[1:].copy_(y[:-1].clone()), False),
    "nothing": (lambda y: y[4:].copy_(y[3:3]), False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_is_read_where_it_is_written(name: str) -> None:
    write, refused = OVERLAPS[name]

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        write(y)
        return (y * y).sum()

    x = torch.randn(4, 4, dtype=torch.float64)
    for stack in STACKS.values():
        if refused:
            with pytest.raises(PurityError, match=r"test_effects\.py:.*Read a copy"):
                stack(fn)(x)
        else:
            torch.testing.assert_close(stack(fn)(x), fn(x))
            torch.testing.assert_close(grad(stack(fn))(x), grad(fn)(x))
