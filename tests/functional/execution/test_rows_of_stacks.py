"""Rows of a stack that a loop writes and stacks again stay in the stack, unless that would be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.profiler import profile

from torchard import jit, repeat, tree
from torchard.functional.compiling.regions import Region
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

AT = torch.tensor([1])
X, Y = torch.arange(3.0), torch.arange(12.0).view(4, 3)
BACKENDS = ["eager", "inductor"]


def stack_then_rows(x: Tensor, stack: Tensor) -> Any:
    """The new stack is written while its rows are still read one by one."""
    x, kept = repeat(lambda y, x: (x + 1, y.index_fill(0, AT, 1)), stack, x, collect=True)
    new = kept.index_fill(0, AT, 7)
    return new, repeat(lambda y, x: (x + y, y * 2), kept, x, collect=True)


def carry_after_the_loop(x: Tensor, stack: Tensor) -> Any:
    """The last row is the carry, too, which is written."""

    def block(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y.index_fill(0, AT, 1)
        return y, y

    x, kept = repeat(block, stack, x, collect=True)
    return x.index_fill(0, AT, 9), kept


def carry_in_the_loop(x: Tensor, stack: Tensor) -> Any:
    """Each row is the carry, too, which the next iteration writes."""

    def block(y: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y = y.index_fill(0, AT, 1)
        return y, (y, x.index_fill(0, AT, 5))

    return repeat(block, stack, x, collect=True)


def row_before(x: Tensor, stack: Tensor) -> Any:
    """What a row was is carried on."""
    return repeat(lambda y, x: (y[:2].sum() + x, y.index_fill(0, AT, 1)), stack, x, collect=True)


def view_of_a_row(x: Tensor, stack: Tensor) -> Any:
    """A part of what a row was is returned."""

    def block(y: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return x + 1, (y.index_fill(0, AT, 1), y[1:])

    return repeat(block, stack, x, collect=True)


def view_of_the_stack(x: Tensor, stack: Tensor) -> Any:
    """A loop carries on a part of a stack whose rows a later loop writes."""
    first = repeat(lambda _, x: (stack[2, :1], x * 2), torch.zeros(4), x[:1], collect=True)
    return first, repeat(lambda y, x: (x + 1, y.index_fill(0, AT - 1, -5)), stack, x, collect=True)


def stack_before(x: Tensor, stack: Tensor) -> Any:
    """What the stack was is read after the loop."""
    return repeat(lambda y, x: (x, y.index_fill(0, AT, 1)), stack, x, collect=True), stack.sum(0)


def two_of_a_row(x: Tensor, stack: Tensor) -> Any:
    def block(y: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return x + y, (y.index_fill(0, AT, 1), y.index_fill(0, AT - 1, 2))

    return repeat(block, stack, x, collect=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("donated", [(1,), (0, 1)])
@pytest.mark.parametrize(
    "fn",
    [
        *(stack_then_rows, carry_after_the_loop, carry_in_the_loop),
        *(row_before, view_of_a_row, view_of_the_stack, stack_before, two_of_a_row),
    ],
)
def test_rows_that_are_not_only_stacked(fn: Any, donated: tuple[int, ...], backend: str) -> None:
    run = jit(fn, backend=backend, donate_argnums=donated)
    for _ in range(2):
        for a, b in zip(tree.leaves(run(X.clone(), Y.clone())), tree.leaves(fn(X, Y)), strict=True):
            assert torch.equal(a, b)


def layer(params: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Any]:
    w, keys, values = params
    x = torch.tanh(x @ w)
    keys, values = keys.index_copy(0, at, x[None]), values.index_copy(0, at, x[None] * 2)
    return x + keys.sum(0) * values.sum(0), (keys, values)


def decoder(ws: Tensor, caches: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Any]:
    return repeat(layer, (ws, *caches), x, at, collect=True)


def test_compiled_layers_write_the_rows_of_donated_caches() -> None:
    """Nothing is copied, and each call writes where the one before did."""
    run, ws = jit(decoder, donate_argnums=1), torch.linspace(-1, 1, 80).view(5, 4, 4)
    have = torch.zeros(5, 8, 4), torch.zeros(5, 8, 4)
    want, x, places = have, torch.ones(4), [c.data_ptr() for c in have]
    for i in range(3):
        at = torch.tensor([i])
        wanted, want = decoder(ws, want, x, at)
        with profile() as events:
            found, have = run(ws, have, x, at)
        torch.testing.assert_close((found, have), (wanted, want))
        assert [c.data_ptr() for c in have] == places
        assert i == 0 or not {"aten::copy_", "aten::clone"} & {e.name for e in events.events()}


@pytest.mark.parametrize("hold", [lambda c: c[0], lambda c: c.view(-1), lambda c: c[2, 1:]])
def test_compiled_layers_leave_what_others_hold(hold: Any) -> None:
    run, ws, at = jit(decoder, donate_argnums=1), torch.zeros(5, 4, 4), torch.tensor([1])
    for _ in range(2):
        caches = torch.ones(5, 8, 4), torch.ones(5, 8, 4)
        held = hold(caches[0])
        wanted = decoder(ws, caches, torch.ones(4), at)
        torch.testing.assert_close(run(ws, caches, torch.ones(4), at), wanted)
        assert bool((held == 1).all())


def region(run: Any) -> Region:
    """A region that writes into each of two operands."""
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    calls = [graph.call_function(aten.index_fill.int_Scalar, (x, 0, one, 1)) for x in (one, other)]
    for node in graph.nodes:
        VAL.set(node, torch.zeros(2))
    graph.output(calls)
    return Region(run, calls, may_write=True)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, _: [x[0].fill_(1), x[1].fill_(2)],
        lambda x, _: [x[1].fill_(1), x[0].fill_(2)],
        lambda x, _: [x[0].fill_(1), torch.full((2,), 2.0)],
        lambda x, _: [torch.full((2,), 1.0), x[0].fill_(2)],
    ],
)
def test_wherever_compiled_code_writes(run: Any) -> None:
    """Results end in their places, also if one of them was in that of the other."""
    rows = torch.zeros(2, 2)
    made = region(run)
    assert made.rewritten == {0: 0, 1: 1}
    found: Sequence[Tensor] = made([rows[0], rows[1]], [(0, 0), (1, 1)])
    assert [x.data_ptr() for x in found] == [rows[0].data_ptr(), rows[1].data_ptr()]
    assert rows.tolist() == [[1, 1], [2, 2]]
