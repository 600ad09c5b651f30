"""Lifetimes of what collectives read and write, and buckets that are computed in place.

Ranks of process groups run planned programs in tests/sharding/lowering/test_gloo.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Mesh, MeshTensor, P, jit, place, shard
from torchard.functional.memory.lifetimes import Lifetimes
from torchard.functional.memory.plan import MemoryPlan
from torchard.functional.memory.planned_code import poisoned
from torchard.functional.reports.memory import Memory
from torchard.functional.torch_internals.operators import aten, c10d

PARAMS = [torch.arange(256.0).reshape(16, 16) % 3 - 1 for _ in range(4)]


def step(params: list[Tensor], x: Tensor) -> tuple[Any, Tensor]:
    def loss(params: list[Tensor]) -> Tensor:
        value = x
        for w in params:
            value = torch.relu(value @ w) - value
        return value.sum()

    grads, value = torch.func.grad_and_value(loss)(params)
    return [p - g for p, g in zip(params, grads, strict=True)], value


def memory(spec: P) -> Memory:
    mesh, specs = Mesh({"dp": 4}, virtual=True), [spec] * 4
    sharded = shard(step, mesh, in_specs=(specs, P("dp")), out_specs=(specs, P()))
    return jit(sharded, backend="eager", donate_argnums=0).lower(PARAMS, torch.ones(16, 16)).memory


def plan(spec: P) -> MemoryPlan:
    return memory(spec).plan


@pytest.mark.parametrize("spec", [P(), P("dp")], ids=["data parallel", "fully sharded"])
def test_memory_is_not_reused_before_a_collective_is_awaited(spec: P) -> None:
    tape = plan(spec).tape
    lifetimes = Lifetimes(tape)
    issued = 0
    for at, step in enumerate(tape.steps):
        if str(step.function).startswith("_c10d") and step.function is not c10d.wait_tensor.default:
            allocates = step.function is c10d.all_to_all_single.default
            result = step.results[0] if allocates else step.kwargs.get("out", step.args[0])
            wait = next(
                later
                for later, other in enumerate(tape.steps[at:], at)
                if other.function is c10d.wait_tensor.default
                and lifetimes.of(other.args[0]) is lifetimes.of(result)
            )
            issued += 1
            assert all(lifetimes.of(operand).end >= wait for operand in step.operands)
    assert issued


def test_a_bucket_is_computed_where_it_is_sent_from() -> None:
    """All but a loss: a bucket that is there since the forward would hold memory for longer."""
    steps = plan(P()).tape.steps
    names = [str(step.function) for step in steps]
    assert "aten.cat.out" not in names
    assert "aten.cat.default" not in names
    assert "_c10d_functional.all_reduce_.default" in names
    copied = [step.args[1] for step in steps if step.function is aten.copy_.default]
    assert all(value.numel() == 1 for value in copied)


def test_bytes_copied() -> None:
    """A bucket of four gradients of 16 × 16 floats is concatenated; in planned memory, nothing is, but
    what ranks get a part of each. The loss is copied into the bucket, and out of it.
    """
    assert (memory(P()).copied, memory(P()).planned_copied) == (4 * 16 * 16 * 4 + 8, 8)
    assert (memory(P("dp")).copied, memory(P("dp")).planned_copied) == (4096, 4096)


def test_bytes_copied_by_what_may_be_a_view() -> None:
    """A reshape of a transposed operand copies, as `contiguous` does; of others they are views."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(8) + y.reshape(8) * y.contiguous().view(8) + x.t().contiguous().view(8).clone()

    report = jit(f, backend="eager").lower(torch.ones(2, 4), torch.ones(4, 2).t()).memory
    assert report.copied == (2 + 1) * 8 * 4  # y twice; x transposed: its clone is the copy itself


def test_bytes_copied_by_what_is_concatenated() -> None:
    """Of operands that the program does not compute, in planned memory too."""
    run = jit(lambda x, y: torch.cat([x, y]) * 2, backend="eager")
    report = run.lower(torch.ones(4), torch.ones(4)).memory
    assert (report.copied, report.planned_copied) == (8 * 4, 8 * 4)


@pytest.mark.parametrize("spec", [P(), P("dp")], ids=["data parallel", "fully sharded"])
def test_on_a_virtual_mesh(spec: P) -> None:
    mesh, specs = Mesh({"dp": 4}, virtual=True), [spec] * 4
    sharded = shard(step, mesh, in_specs=(specs, P("dp")), out_specs=(specs, P()))
    x = torch.arange(256.0).reshape(16, 16) % 5 - 2
    want, total = step(PARAMS, x)
    with poisoned():
        run = jit(sharded, backend="eager", memory="planned", donate_argnums=0)
        for _ in range(3):
            new, value = run(place([p.clone() for p in PARAMS], mesh, specs), x)
            assert torch.equal(_whole(value), total)
            assert all(map(torch.equal, map(_whole, new), want))


def _whole(value: Any) -> Tensor:
    return value.full() if isinstance(value, MeshTensor) else value
