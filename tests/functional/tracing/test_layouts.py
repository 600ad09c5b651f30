"""How values lie in memory, of which torch forgets some on fakes, and a graph all: against torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from effect_ways import WAYS, Fn, backward, differences, quiet
from effort import examples
from torch.func import jvp

from torchard import checkpoint
from torchard.functional.core.errors import PurityError

TURNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t_": lambda v: v.t_(),
    "transpose_": lambda v: v.transpose_(-2, -1),
    "swapaxes_": lambda v: v.swapaxes_(0, -1),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "squeeze_": lambda v: v.unsqueeze_(1).squeeze_(1).unsqueeze_(0),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "seen": lambda v: v.mul_(0.5),
    "without gradients": lambda v: _without(lambda: v.mul_(0.5)),
    "detached": lambda v: v.detach().mul_(0.5),
    "none": lambda v: None,
}
TURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the value": lambda y: y,
    "a view": lambda y: y.mT,
    "a part": lambda y: y[:2, :2],
    "a copy": lambda y: y.clone(),
}


def _without(run: Callable[[], object]) -> object:
    with torch.no_grad():
        return run()


def turning(turn: str, turned: str, write: str, through: int) -> Fn:
    """Of a square, so that dims in the wrong order raise nothing; for derivatives it runs again."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        earlier = y[0]
        v = TURNED[turned](y)
        TURNS[turn](v)
        later = v[0]
        WRITES[write]((earlier, v, later)[through])
        with torch.no_grad():
            scale = x.mean()
        read = torch.cat([part.reshape(-1) for part in (earlier, y, v, later)])
        return (scale * read.pow(3) * torch.arange(len(read))).sum()

    return fn


CASES = list(product(TURNED, WRITES, range(3)))


@quiet
@pytest.mark.parametrize("turn", TURNS)
def test_dims_given_in_place(turn: str) -> None:
    """Of the views that autograd takes again after a write, on fakes, torch forgets the turns."""
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    further = [way for way in WAYS if way not in ("value", "gradient")]
    for i in range(list(TURNS).index(turn), len(CASES), examples(ci=79, explore=1)):
        fn, stack = turning(turn, *CASES[i]), ("checkpoint", "jit", "checkpoint of shard")[i % 3]
        assert not differences(fn, x, stack, ("value", "gradient", further[i % len(further)])), CASES[i]


def test_an_input_that_nothing_follows_has_no_gradient() -> None:
    def fn(x: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turning("t_", "a view", "without gradients", 2)(x), unused.detach() * 2

    x, unused = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    for run in (fn, checkpoint(fn)):
        out, other = run(x, unused)
        assert out.requires_grad and not other.requires_grad
        assert torch.autograd.grad(out, (x, unused), allow_unused=True)[1] is None


class Twice(torch.autograd.Function):
    """Without setup_context, which torch refuses inside torch.func."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("written", (True, False))
def test_autograd_functions_beside_dims_given_in_place(written: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        view, copy = x.sin().mT, x.cos()
        view.t_()
        copy.t_()
        (view if written else copy)[0].mul_(0.5)
        return (Twice.apply(view) * view * copy * torch.arange(9.0).view(3, 3)).sum()

    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    if written:
        with pytest.raises(PurityError, match=r"calls an autograd\.Function without setup_context"):
            backward(checkpoint(fn), x)
    else:
        torch.testing.assert_close(backward(checkpoint(fn), x), backward(fn, x))


@pytest.mark.parametrize("method", (True, False))
def test_plain_autograd_inside_is_refused_by_name(method: bool) -> None:
    """Inside of a trace torch would give the gradient of other views, without a word."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        z = y * 1
        z.mT.t_()[0].mul_(0.5)
        loss = (z * z * x).sum()
        if method:
            loss.backward()
        return torch.autograd.grad(loss, y)[0]

    with pytest.raises(PurityError, match=r"test_layouts\.py:\d+ in fn takes a gradient by"):
        checkpoint(fn)(torch.ones(3, 3))


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a column": lambda y: y[..., -1],
    "rows": lambda y: y[1:],
    "every other column": lambda y: y[:, ::2],
    "a diagonal": lambda y: y.diagonal(1),
    "transposed": lambda y: y[:2].mT,
    "turned": lambda y: y[1:, 1:].unsqueeze_(0),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold": lambda v: v.unfold(0, 1, 1),
    "[1:]": lambda v: v[1:],
    "[..., ::2]": lambda v: v[..., ::2],
    "unsqueeze": lambda v: v.unsqueeze(0),
    "movedim": lambda v: v.movedim(0, -1),
    "detach": lambda v: v.detach(),
}


@pytest.mark.parametrize("part", PARTS)
def test_tangents_of_views_in_a_trace_that_is_not_the_first(part: str) -> None:
    """torch's cache of fake results forgets the memory around a tangent that is copied."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        stopped = PARTS[part](y).detach()
        stopped += PARTS[part](y)
        return torch.cat([view(stopped).reshape(-1) for view in VIEWS.values()]).square().sum()

    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = jvp(fn, (x,), (x.cos(),))[1]
    for _ in range(2):
        have = checkpoint(lambda x: jvp(fn, (x,), (x.cos(),))[1])(x)
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


GAPPED: dict[str, Fn] = {
    "in rows": lambda v: v[:, ::2].reshape(-1),
    "of all": lambda v: v.view(9, 1) if v.is_contiguous() else v.reshape(9),
    "in columns": lambda v: v.mT[::2].reshape(2, 1, 3),
}


@quiet
@pytest.mark.parametrize("name", GAPPED)
def test_memory_with_gaps(name: str) -> None:
    """Values of a graph have none, so what is a view in the function may need a copy in the graph."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        v = torch.empty_strided((3, 3), (4, 1), dtype=x.dtype)
        v.copy_(x * 2)
        return GAPPED[name](v).sin().sum() + (v * v).sum()

    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for stack in ("checkpoint", "jit"):
        assert not differences(fn, x, stack, ("value", "gradient", "jvp", "gradient of vmap")), stack
