"""Running sums are computed in place: with the same values, and nobody else sees a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from torchard import Mesh, MeshTensor, P, accumulate, place, random, shard, trace
from torchard.functional.execution.codegen import compiled
from torchard.functional.programs.running_sums import in_place

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)


def writes(graph: fx.Graph) -> list[str]:
    """The operations that write, in order."""
    found = in_place(graph)
    names = [] if found is None else [str(node.target) for node in found.nodes]
    return [name for name in names if name in ("aten.add_.Tensor", "aten.addmm_.default")]


def operand(number: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return random.randint(random.key(number), shape, -2, 3).to(dtype)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "add a scaled one": lambda a, b: torch.add(a, b, alpha=2) if a.dtype != torch.bool else a + b,
    "add a number": lambda a, b: a + True,
    "multiply": torch.mul,
    "matrix product": lambda a, b: a @ b if a.dtype != torch.bool else a * b,
    "transpose": lambda a, b: a.T,
    "row": lambda a, b: a[0],
    "wider": lambda a, b: a.to(torch.float64) if not a.is_complex() else a,
    "copy": lambda a, b: b.clone(),
}


@settings(max_examples=examples(150, 3000))
@given(st.data())
def test_random_sums(data: st.DataObject) -> None:
    """Chains of sums, with parts that are read again, viewed, broadcast, widened, and returned."""
    step = st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 9))
    steps = data.draw(st.lists(step, max_size=9))
    sums = data.draw(st.integers(2, 6))
    kept = data.draw(st.lists(st.integers(0, 30), max_size=2))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in "ab"]

    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for name, which in steps:
            left, right = values[which % len(values)], values[-1]
            if left.ndim == right.ndim == 2 and left.dtype == right.dtype:
                values.append(OPERATIONS[name](left, right))
        total = values[0] + values[-1]
        for i in range(sums):
            values.append(total)
            part = values[i % len(values)]
            product = i % 2 and part.ndim == 2 and part.dtype == b.dtype != torch.bool
            total = total + (part @ b if product else part)
        return [total, *(values[i % len(values)] for i in kept)]

    args = operand(0, dtypes[0], 3, 3), operand(1, dtypes[1], 3, 3)
    want, before = fn(*args), [x.clone() for x in args]
    have = compiled(trace(fn)(*args).graph)(args)
    for a, b in zip(have, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert all(map(torch.equal, args, before))


def chain(a: Tensor, parts: list[Tensor]) -> Tensor:
    total = a + parts[0]
    for part in parts[1:]:
        total = total + part @ a
    return total


def test_what_is_written() -> None:
    """The first sum is a tensor of its own; products are computed into it."""
    a, parts = torch.ones(3, 3), [torch.ones(3, 3)] * 4
    program = trace(chain)(a, parts)
    assert writes(program.graph) == ["aten.addmm_.default"] * 3
    fixed, buffer = 4 * 9 * 5, 4 * 9  # bytes: arguments, and the sum
    assert program.peak == fixed + buffer
    one = trace(lambda a, b: (a + b).sin())(a, a)  # an argument's storage is not taken
    assert one.peak == 2 * 36 + 2 * 36


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda a, b: (a + b) + a.sum(0), 1),
        (lambda a, b: ((a + b).T + a) + b, 1),
        (lambda a, b: a.T + b, 0),  # writes to an argument
        (lambda a, b: [s := a + b, s + a], 0),  # returned as well
        (lambda a, b: (s := a + b) + s, 0),
        (lambda a, b: (s := a + b) + s.T, 0),
        (lambda a, b: (a + b[0]) + b.double(), 0),
        (lambda a, b: (a[0] + b[0]) + b, 0),
        (lambda a, b: (a[:1] + b[:1]) + b, 0),
        (lambda a, b: torch.add(a + b, b, alpha=3), 0),
    ],
)
def test_which_sums_are_written(fn: Callable[..., Any], count: int) -> None:
    args = torch.rand(3, 3), torch.rand(3, 3)
    program, want = trace(fn)(*args), fn(*args)
    assert len(writes(program.graph)) == count
    have = compiled(program.graph)(args)
    assert all(map(torch.equal, have, want if isinstance(want, list) else [want]))


def test_under_transforms_of_torch() -> None:
    """A sum without a batch cannot be written into by a part with one."""
    program = trace(lambda a, b, c: ((a + b) + c) + a)(*[torch.ones(3)] * 3)
    run = compiled(program.graph)
    assert len(writes(program.graph)) == 2
    cs = torch.arange(6.0).reshape(2, 3)
    args = torch.ones(3), torch.ones(3)
    mapped = torch.func.vmap(lambda c: run((*args, c))[0])(cs)
    assert torch.equal(mapped, cs + 3)
    tangent = torch.func.jvp(lambda c: run((*args, c))[0], (cs[0],), (cs[1],))[1]
    assert torch.equal(tangent, cs[1])


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}])
def test_a_gradient_that_is_accumulated_has_one_buffer(axes: dict[str, int]) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).square().sum()

    step: Any = accumulate(torch.func.grad(loss), 6, batch=(None, 0))
    w, x = torch.ones(8, 4), torch.arange(96.0).reshape(12, 8)
    want = torch.func.grad(loss)(w, x)
    if axes:
        mesh = Mesh(axes, virtual=True)
        spec = P("dp") if "dp" in axes else P()
        w_spec = P(None, "tp") if "tp" in axes else P()
        step = shard(step, mesh, out_specs=w_spec)
        w, x = place(w, mesh, w_spec), place(x, mesh, spec)
    program = step.lower(w, x)
    graph = program.graph if program.runtime is None else program.runtime.graph(program).graph
    assert writes(graph) == ["aten.addmm_.default"] * 4 * max(axes.get("dp", 1), axes.get("tp", 1))
    have = step(w, x)
    assert torch.equal(have.full() if isinstance(have, MeshTensor) else have, want)
