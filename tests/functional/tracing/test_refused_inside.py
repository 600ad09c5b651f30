"""What torch refuses inside of its transforms: f-strings of tensors, and old autograd Functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vjp, vmap

from torchard import Mesh, PurityError, checkpoint, jit, repeat, shard

X = torch.arange(1.0, 4.0)


class Twice(torch.autograd.Function):
    """Without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def applied(x: Tensor) -> Tensor:
    return Twice.apply(x).square().sum()


def printed(x: Tensor) -> Tensor:
    assert f"{(x > 0).sum()} of {x}, {x.mean()!s}" and format(x.sum())
    return x.square().sum()


def rounded(x: Tensor) -> Tensor:
    assert f"{x.mean():.2f}"
    return x.square().sum()


STACKS: dict[str, Callable[[Any], Any]] = {
    "jit of grad": lambda f: jit(grad(f), backend="eager"),
    "grad of jit": lambda f: grad(jit(f, backend="eager")),
    "grad of checkpoint": lambda f: grad(checkpoint(f)),
    "shard of grad": lambda f: shard(grad(f), Mesh({"dp": 2}, virtual=True)),
    "shard of vmap of grad": lambda f: shard(
        lambda x: vmap(grad(f))(x[None])[0], Mesh({"dp": 2}, virtual=True)
    ),
    "grad of shard": lambda f: grad(shard(f, Mesh({"dp": 2}, virtual=True))),
}


@pytest.mark.parametrize("stack", STACKS)
def test_texts_of_tensors(stack: str) -> None:
    """Without a format they show dtype and shape; with one they are refused, with the line."""
    have = STACKS[stack](printed)(X)
    assert (have.full() if hasattr(have, "full") else have).tolist() == (2 * X).tolist()
    with pytest.raises(PurityError, match=r"test_refused_inside\.py:\d+ in rounded puts .*'\.2f'"):
        STACKS[stack](rounded)(X)


def test_functions_without_setup_context_say_what_works() -> None:
    with pytest.raises(PurityError, match=r"without setup_context.*torch\.func\.grad\(jit\(f\)\)"):
        jit(grad(applied), backend="eager")(X)
    assert grad(jit(applied, backend="eager"))(X).tolist() == (8 * X).tolist()


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist()[0],
    "numpy": lambda x: x.detach().numpy()[0],
    "array": lambda x: np.asarray(x.detach())[0],
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    **STACKS,
    "jit": lambda f: jit(f, backend="eager"),
    "jit of vmap": lambda f: lambda x: jit(vmap(f), backend="eager")(x[None]),
    "jit of vmap of grad": lambda f: lambda x: jit(vmap(grad(f)), backend="eager")(x[None]),
    "vmap of jit": lambda f: lambda x: vmap(jit(f, backend="eager"))(x[None]),
}


@pytest.mark.parametrize("stack", AROUND)
@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_read_is_refused_by_line(read: str, stack: str) -> None:
    def reads(x: Tensor) -> Tensor:
        return x.sum() * READS[read](x)

    line = r"test_refused_inside\.py:\d+ in <lambda> needs the value of a tensor"
    with pytest.raises(PurityError, match=line):
        AROUND[stack](reads)(X)


@torch.library.custom_op("test_refused_inside::double_", mutates_args={"x"})
def double_(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("stack", STACKS)
def test_an_operator_that_writes_is_refused_as_what_it_is(stack: str) -> None:
    def writes(x: Tensor) -> Tensor:
        y = x * 2
        double_(y)
        return y.sum()

    with pytest.raises(PurityError, match=r"\.py:\d+ in writes writes in place by test_.*double_"):
        STACKS[stack](writes)(X)


@pytest.mark.parametrize("lengths", [(4,), torch.tensor([4])], ids=["tuple", "tensor"])
@pytest.mark.parametrize("stack", STACKS)
def test_an_operator_that_reads_values_is_named(stack: str, lengths: Any) -> None:
    def loss(x: Tensor) -> Tensor:
        scores = torch.log_softmax(x.expand(4, 1, 3), -1)
        targets = torch.tensor([[1, 2]])
        return F.ctc_loss(scores, targets, lengths, (2,) if type(lengths) is tuple else lengths - 2)

    with pytest.raises(PurityError, match=r"\.py:\d+ in loss calls aten\._ctc_loss.* reads the values"):
        STACKS[stack](loss)(X)


def pulled_outside(w: Tensor, x: Tensor) -> Tensor:
    _, pull = vjp(lambda z: torch.tanh(z * w + x), x)
    return repeat(lambda _, v: pull(v)[0], torch.zeros(3), x)


def pulled_inside(w: Tensor, x: Tensor) -> Tensor:
    def block(_: Tensor, v: Tensor) -> Any:
        return vjp(lambda z: torch.tanh(z * w + x), x)[1](v)[0]

    return repeat(block, torch.zeros(3), x)


PULLED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, Mesh({"dp": 1}, virtual=True)),
    "grad of jit": lambda f: grad(lambda w, x: jit(f, backend="eager")(w, x).sum()),
    "jit of grad": lambda f: jit(grad(lambda w, x: f(w, x).sum()), backend="eager"),
}


@pytest.mark.parametrize("stack", PULLED)
def test_a_vjp_taken_outside_of_a_block_says_to_take_it_inside(stack: str) -> None:
    w = X / 4
    plain = pulled_outside if "grad" not in stack else grad(lambda w, x: pulled_inside(w, x).sum())
    have = PULLED[stack](pulled_inside)(w, X)
    torch.testing.assert_close(have.full() if hasattr(have, "full") else have, plain(w, X))
    line = r"test_refused_inside\.py:\d+ in <lambda> calls the function that torch\.func\.vjp returned"
    with pytest.raises(PurityError, match=line + ".*outside.*Take the vjp inside"):
        PULLED[stack](pulled_outside)(w, X)
