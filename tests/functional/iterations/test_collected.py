"""What a loop collects has every row, however the loop is transformed and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from loop_calls import CALLS, poisoned_buffer

from torchard import Mesh, P, checkpoint, jit, policies, repeat, shard
from torchard.functional.iterations import collecting
from torchard.functional.iterations.collecting import Rows, Total, kept
from torchard.functional.loops import equal_layers

Tensor = torch.Tensor
F64 = torch.float64
MESH = Mesh({"a": 2}, virtual=True)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "new_buffer", poisoned_buffer)
    monkeypatch.setattr(equal_layers, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(equal_layers, "MIN_SAVED", 1)


def _entered(x: Tensor, w: Tensor) -> Any:
    return repeat(lambda p, c: (c * p, c), w, x, collect=True)


def _view(x: Tensor, w: Tensor) -> Any:
    return repeat(lambda p, c: (c.sin(), c), w, x.t()[:2], collect=True)


def _shared(x: Tensor, w: Tensor) -> Any:
    return repeat(lambda p, c, y: (c * p, y), w, x[0], x, collect=True)


def _row(x: Tensor, w: Tensor) -> Any:
    return repeat(lambda p, c: (c * 2, p), w, x, collect=True)


def _alternating(x: Tensor, w: Tensor) -> Any:
    swapped = repeat(lambda p, cs: ((cs[1], cs[0] * p), cs), w, (x, torch.ones_like(x)), collect=True)
    return swapped[0][0], *swapped[1]


def _by_hand(x: Tensor, w: Tensor) -> Any:
    entered = []
    for i in range(3):
        entered.append(x)
        x = x * w[i]
    return x, torch.stack(entered)


LOOPS = [_entered, _view, _shared, _row, _alternating, _by_hand]
WAYS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "planned": lambda f: jit(f, backend="eager", memory="planned"),
    "checkpoint": checkpoint,
    "dots": lambda f: checkpoint(f, policy=policies.save_dots),
    "fuse": fuse,
    "shard": lambda f: shard(f, MESH, (P("a"), P()), P()),
    "jit of shard": lambda f: jit(shard(f, MESH, (P(None, "a"), P("a")), P()), backend="eager"),
    "bound": lambda f: lambda *xs: jit(f, backend="eager").lower(*xs).bind()(xs),
}


def _assert_same(have: Any, want: Any) -> None:
    assert len(have) == len(want)
    for one, other in zip(have, want, strict=True):
        one = one.full() if hasattr(one, "full") else one
        torch.testing.assert_close(one.detach(), other.detach())


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(3, 3, generator=generator, dtype=F64) for _ in range(2))
    return x, w[:, :1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_row_is_written(loop: Any, way: str) -> None:
    """One transformed function, called in every way."""
    x, w = _inputs()
    run = WAYS[way](loop)
    for call in CALLS.values():
        _assert_same(call(run)(x, w), loop(x, w))


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_of_collected_rows(loop: Any) -> None:
    """By autograd, from leaves."""
    x, w = (x.requires_grad_() for x in _inputs())
    for run in (jit(loop, backend="eager"), checkpoint(loop)):
        for have, want in zip(_gradients(run, x, w), _gradients(loop, x, w), strict=True):
            torch.testing.assert_close(have, want)


def _gradients(fn: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
    loss = sum(y.sin().sum() for y in fn(*leaves))
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


def test_inductor_writes_every_row() -> None:
    x, w = _inputs()
    _assert_same(jit(_entered)(x.requires_grad_(), w), _entered(x, w))


@pytest.mark.parametrize("graded", [(0,), (1,), (2,), (0, 2), ()])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_rows_and_totals_of_values_some_of_which_autograd_records(
    graded: tuple[int, ...], order: list[int]
) -> None:
    values = [torch.full((2,), float(i)).requires_grad_(i in graded) for i in range(3)]
    rows, total = Rows(3), Total()
    for i in order:
        rows.put(i, values[i])
        total.put(i, values[i])
    torch.testing.assert_close(rows.get().detach(), torch.tensor([[0.0, 0], [1, 1], [2, 2]]))
    torch.testing.assert_close(total.get().detach(), torch.tensor([3.0, 3]))
    leaves = [values[i] for i in graded]
    if leaves:
        (rows.get().sum() + total.get().sum()).backward()
        assert all(torch.equal(leaf.grad, torch.tensor([2.0, 2])) for leaf in leaves)  # type: ignore[arg-type]


def test_a_row_that_was_not_written_is_not_returned() -> None:
    rows = Rows(3)
    rows.put(0, torch.ones(2))
    rows.put(2, torch.ones(2))
    with pytest.raises(AssertionError, match="row 1 was not written"):
        rows.get()


def _conjugate(z: Tensor, w: Tensor) -> Tensor:
    return repeat(lambda p, c: (c * p).conj(), w, z).imag


def _negative(z: Tensor, w: Tensor) -> Tensor:
    return repeat(lambda p, c: (c, (c * p).conj().imag), w, z, collect=True)[1]


@pytest.mark.parametrize("loop", [_conjugate, _negative])
@pytest.mark.parametrize("way", ["jit", "planned"])
def test_lazy_conjugates_are_handed_on_as_values(loop: Any, way: str) -> None:
    z, w = torch.complex(*_inputs()[:1] * 2), _inputs()[1]

    def gradient(z: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda z: loop(z, w).square().sum())(z)

    for fn in (loop, gradient):
        have = WAYS[way](fn)(z, w)
        torch.testing.assert_close(have.full() if hasattr(have, "full") else have, fn(z, w))


def _twice_differentiated(body: Any) -> Any:
    """By `grad` of `grad` around the transformed loop."""

    def of(transform: Any) -> Any:
        run = transform(lambda x, w: repeat(body, w, x))
        inner = torch.func.grad(lambda x, w: run(x, w).sin().sum())
        return lambda x, w: (torch.func.grad(lambda x: inner(x, w).sum())(x),)

    return of


BODIES = [
    lambda p, c: c * 2,
    lambda p, c: c * p,
    lambda p, c: c.flip(0),
    lambda p, c: c + p,
    lambda p, c: c.sin(),
    lambda p, c: c - torch.func.grad(lambda c: (c * p).sin().sum())(c),
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("way", ["jit", "checkpoint"])
def test_second_derivatives_around_a_loop(body: Any, way: str) -> None:
    """Of linear bodies too, whose gradients read nothing but the shapes of what they were computed of."""
    x, w = _inputs()
    of = _twice_differentiated(body)
    _assert_same(of(WAYS[way])(x, w), of(lambda f: f)(x, w))


@pytest.mark.parametrize("body", BODIES[::3])
@pytest.mark.parametrize("way", ["jit", "shard"])
def test_hessian_products_inside_of_transforms(body: Any, way: str) -> None:
    x, w = _inputs()

    def product(x: Tensor, w: Tensor) -> tuple[Tensor]:
        collected = lambda x: repeat(lambda p, c: (body(p, c), c.amax(1)), w, x, collect=True)  # noqa: E731
        gradient = torch.func.grad(lambda x: sum(y.sin().sum() for y in collected(x)))
        return (torch.func.jvp(gradient, (x,), (x,))[1],)

    run = checkpoint(product)
    _assert_same(WAYS[way](run)(x, w), product(x, w))


def test_kept_rows_of_one_memory() -> None:
    stack = torch.arange(24.0).reshape(4, 2, 3)
    found = kept([None, *stack.mT.unbind(0)])
    assert found is not None and found.first == 1
    assert torch.equal(found[2], stack[1].mT) and found.address == stack.data_ptr() - 24
    others: list[list[torch.Tensor | None]] = [
        [*stack.unbind(0), None],
        [stack[0], stack[2], stack[1]],
        [stack[0], stack[1].mT.reshape(2, 3)],
        [torch.zeros(3) for _ in range(5)],
        [*stack.unbind(0), torch.zeros(2, 3)],
        [None, None],
    ]
    assert [kept(each) for each in others] == [None] * len(others)


def test_kept_rows_past_the_end() -> None:
    """Tensors at equal distances in memory that is not one's."""
    memory = torch.arange(8.0)
    alone = [torch.tensor([]).set_(memory[i : i + 2].clone().untyped_storage()) for i in (0, 2, 4)]
    assert kept(alone) is None
