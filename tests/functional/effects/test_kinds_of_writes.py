"""Writes through views of another dtype, to several tensors and to out=, and memory read by strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effect_ways import STACKS, differences, quiet
from torch import Tensor

from torchard import PurityError, checkpoint, jit

F64, I64 = torch.float64, torch.int64
X = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


def complex_of(x: Tensor) -> Tensor:
    return torch.complex(x.sin(), x.cos())


def pair_of(x: Tensor) -> Tensor:
    return torch.stack([x, x.sin()], -1)


def number(y: Tensor) -> Tensor:
    """One number, by which each element counts differently, and real and imaginary parts."""
    parts = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.double()
    return (parts * torch.linspace(-1, 2, parts.numel(), dtype=F64).view_as(parts)).sin().sum()


Write = Callable[[Tensor, Tensor], object]

# What is written, into a value made of x, whose memory is that of a complex tensor.
COMPLEX: dict[str, Write] = {
    "a conjugate": lambda y, x: y.copy_(complex_of(x).conj()),
    "a row of a conjugate": lambda y, x: y.conj()[0].mul_(2 + 1j),
    "the imaginary part of a conjugate": lambda y, x: y.conj().imag[0].mul_(2),
    "the real part": lambda y, x: y.real.mul_(2),
    "both parts": lambda y, x: torch.view_as_real(y).mul_(2),
    "permuted parts": lambda y, x: torch.view_as_real(y).copy_(torch.stack([x, x.sin()]).movedim(0, 2)),
    "negated parts": lambda y, x: torch.view_as_real(y).copy_(torch._neg_view(pair_of(x))),
    "parts by strides": lambda y, x: torch.view_as_real(y).as_strided((3,), (3,), 1).mul_(2),
    "some rows": lambda y, x: y[1:3].mul_(2),
    "a column": lambda y, x: y.__setitem__((slice(None), 1), y[:, 0] * 2),
}
PAIRS: dict[str, Write] = {
    "a row of complex numbers": lambda y, x: torch.view_as_complex(y)[0].mul_(2 + 1j),
    "conjugates": lambda y, x: torch.view_as_complex(y).copy_(complex_of(x).conj()),
}
REAL: dict[str, Write] = {
    "bits": lambda y, x: y.view(I64).bitwise_and_(-(2**40)),
    "bits by strides": lambda y, x: y.view(I64).as_strided((3,), (3,), 1).bitwise_and_(-(2**40)),
    "one of the columns": lambda y, x: y.unbind(1)[1].detach().mul_(2),
    "one by strides": lambda y, x: y.as_strided((1, 1), (3, 3), 2).mul_(2),
    "dims of size one by strides": lambda y, x: y.as_strided((1, 3, 2), (0, 1, 4), 2).mul_(2),
    "nothing by strides": lambda y, x: y.as_strided((0, 3), (3, 1)).mul_(2),
    "one of what a sort returns": lambda y, x: y.mul_(x.sort()[0].mul_(2)),
    "a list": lambda y, x: torch._foreach_mul_([y, x * 1], 2.0),
    "a list of products": lambda y, x: torch._foreach_addcmul_([y[0], y[1]], [x[1], x[0]], [x[2], x[3]]),
    "dims, then a row": lambda y, x: (y.t_(), y[0].mul_(2)),
    "a stop": lambda y, x: y[0].copy_(x[0].detach_() if x.grad_fn else x[1].detach()),
}
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "one element many times": lambda y: y.as_strided((3,), (0,), 2),
    "rows many times": lambda y: y.as_strided((2, 3, 3), (1, 0, 1), 2),
    "windows": lambda y: y.as_strided((2, 3), (1, 1), 2),
    "columns": lambda y: torch.stack(y.unbind(1)[::2]),
}
OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda x: sum_of(torch.sort, x, x.new_empty(4, 4), x.new_empty(4, 4, dtype=I64)),
    "max": lambda x: sum_of(torch.max, x, x.new_empty(4), x.new_empty(4, dtype=I64), 1),
    "frexp": lambda x: sum_of(torch.frexp, x, x.new_empty(4, 4), x.new_empty(4, 4, dtype=torch.int32)),
    "another dtype": lambda x: number(torch.sin(x, out=x.new_empty(4, 4, dtype=torch.complex128))),
}


def quantized(x: Tensor) -> Tensor:
    """Its schema has no out=: it writes its range and scale, and returns other tensors."""
    low, high, scale = x.new_tensor([[-1], [1], [1]]).float()
    zero, on = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=I64)
    found = torch.fused_moving_avg_obs_fake_quant(
        *(x.float(), on, on, low, high, scale, zero, 0.1, 0, 255, 0)
    )
    return number(found) + low.sum() + 2 * high.sum() + 3 * scale.sum() + zero.sum()


def shifted(x: Tensor) -> Tensor:
    y = (10 * x).long()
    y &= 13
    y <<= 2
    y ^= 3
    y |= 8
    return number(y * x)


def sum_of(op: Callable[..., object], x: Tensor, first: Tensor, second: Tensor, *args: int) -> Tensor:
    """Of what was written; and of what was returned, which is the same memory."""
    found, _ = op(x, *args, out=(first, second))  # type: ignore[misc]
    first.mul_(2)
    return number(found) + number(second)


def written(start: Callable[[Tensor], Tensor], write: Write) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = start(x).clone()
        write(y, x)
        return number(y)

    return fn


def read(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(2)
        return number(view(y))

    return fn


PROGRAMS = {
    **{f"{name} of complex": written(complex_of, write) for name, write in COMPLEX.items()},
    **{f"{name} of pairs": written(pair_of, write) for name, write in PAIRS.items()},
    **{name: written(torch.sin, write) for name, write in REAL.items()},
    **{f"reads {name}": read(view) for name, view in READ.items()},
    **{f"out= of {name}": fn for name, fn in OUT.items()},
    "ranges of a quantization": quantized,
    "bits of integers": shifted,
}


@pytest.mark.sampled(2)
@quiet
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kind_of_write(name: str) -> None:
    """Under a stack by turns."""
    stacks = [s for s in STACKS if " of " not in s]
    stack = stacks[list(PROGRAMS).index(name) % len(stacks)]
    assert PROGRAMS[name](X).isfinite()  # or torch refuses it, which is no difference
    assert not differences(PROGRAMS[name], X, stack, ("value", "gradient"))


@torch.library.custom_op("torchard_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


def doubled(x: Tensor) -> Tensor:
    y = x.clone()
    double_(y)
    return y


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "resized": (lambda x: torch.sin(x, out=x.new_empty(0)), r"shape \[4, 4\].* of shape \[0\].* resize"),
    "by an operation of the user's": (doubled, r"torchard_tests\.double_.*has no out-of-place form"),
    "parts of a row by strides": (
        written(complex_of, lambda y, x: torch.view_as_real(y[1]).as_strided((3,), (3,), 9).mul_(2)),
        "a view of another dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_is_refused(name: str) -> None:
    fn, said = REFUSED[name]
    for run in (checkpoint(fn), jit(fn, backend="eager")):
        with pytest.raises(PurityError, match=rf"test_kinds_of_writes\.py:\d+.*{said}"):
            run(X)
