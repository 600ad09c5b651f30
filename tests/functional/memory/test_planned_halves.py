"""Forward and backward in planned memory: residuals stay in a block until nothing needs them.

Memory that is not in use is overwritten with NaN before it is used again, in every test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned import (
    HOLDERS,
    cloned,
    layers,
    loop,
    plain,
    plain_stack,
    planned,
    same,
    stack,
    stacked,
    tensor_of,
)
from torch import Tensor

from torchard import tree
from torchard.functional.memory.arena import release, reserved
from torchard.functional.memory.planned_code import poisoned

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def outside(run: Any, params: Any, x: Tensor, **options: Any) -> list[Tensor]:
    """The gradients by backward()."""
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    run(tree.unflatten(tree.structure(params), leaves), x).backward(**options)
    return [p.grad for p in leaves if p.grad is not None]


@pytest.mark.parametrize("loss", [stack, loop, plain_stack])
def test_forward_and_backward_share_a_block(loss: Callable[..., Tensor]) -> None:
    params, x = (stacked(4) if loss is loop else layers(4)), torch.randn(8, 16)
    want = outside(plain(loss), params, x)
    release()
    run = planned(loss)
    assert same(outside(run, params, x), want)
    once = reserved()
    for _ in range(3):
        assert same(outside(run, params, x), want)
    assert reserved() == once


def test_a_backward_takes_no_other_block() -> None:
    params, x = layers(4), torch.randn(8, 16)
    release()
    run = planned(plain_stack)
    outside(run, params, x)
    block = reserved()[CPU]
    outside(run, params, x)
    assert reserved()[CPU] == block
    assert run.lower_joint(params, x, argnums=0).memory.block == block
    outside(run, params, x, retain_graph=True)  # which may not overwrite residuals
    assert reserved()[CPU] > block


def test_residuals_that_are_empty() -> None:
    x = torch.randn(0, 3, requires_grad=True)
    planned(lambda x: (x.sin().exp() * x.cos()).sum())(x).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def test_many_open_graphs() -> None:
    """Each has a block; afterwards a few are kept."""
    release()
    params, x = layers(2), torch.randn(8, 16)
    run = planned(plain_stack)
    outside(run, params, x)
    one = reserved()[CPU]
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    values = [run(tree.unflatten(tree.structure(params), leaves), x) for _ in range(20)]
    assert reserved()[CPU] >= 20 * one
    del values
    outside(run, params, x)
    assert reserved()[CPU] <= 6 * one


def test_backward_under_autocast() -> None:
    params, x = layers(2), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value.backward()
    assert same([p.grad for p in leaves], want)


def test_batched_gradients_of_autograd() -> None:
    x = torch.randn(3, requires_grad=True)
    y = planned(lambda x: x.sin().exp() * x)(x)
    vectors = torch.randn(2, 3)
    (batched,) = torch.autograd.grad(y, x, vectors, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, x, vector, retain_graph=True)[0] for vector in vectors]
    assert torch.allclose(batched, torch.stack(single))


def test_residuals_that_are_still_needed() -> None:
    """Several forwards before their backwards, a retained graph, a graph that is dropped."""
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    mine = tree.unflatten(tree.structure(params), leaves)
    values = [run(mine, x) for _ in range(3)]
    run(mine, x * 2)  # dropped
    for value in reversed(values):
        assert same(torch.autograd.grad(value, leaves, retain_graph=True), want)
        assert same(torch.autograd.grad(value, leaves), want)
    grads = torch.autograd.grad(run(mine, x), leaves, create_graph=True)
    assert same(grads, want)
    total = sum(g.square().sum() for g in grads)
    second = torch.autograd.grad(total, leaves)
    leaves2 = [p.detach().clone().requires_grad_() for p in leaves]
    grads2 = torch.autograd.grad(
        plain(plain_stack)(tree.unflatten(tree.structure(params), leaves2), x), leaves2, create_graph=True
    )
    assert same(second, torch.autograd.grad(sum(g.square().sum() for g in grads2), leaves2))


def test_saved_tensor_hooks() -> None:
    """Hooks that keep what is saved, copy it, or put it elsewhere."""
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        copies.append(value.clone())
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        assert same(outside(run, params, x), want)
    assert same(outside(run, params, x), want)
    assert same(kept, copies)
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v.double(), lambda v: v.float()):
        assert same(outside(run, params, x), want)
    with torch.autograd.graph.save_on_cpu():
        assert same(outside(run, params, x), want)


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_residuals_that_the_caller_reads(make: Callable[[Tensor], Any]) -> None:
    """What torch shows of a graph stays valid after its backward, and what shares its memory."""
    params, x = layers(3), torch.randn(8, 16)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    run = planned(plain_stack)
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    seen = [make(v) for v in value.grad_fn.saved_tensors]
    copies = cloned([tensor_of(v) for v in seen])
    value.backward()
    run(layers(3), x)
    assert same([tensor_of(v) for v in seen], copies)


def test_error_in_a_backward() -> None:
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    assert same(outside(run, params, x), want)
