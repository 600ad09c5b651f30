"""Writes in place: which ones are made, and that values stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reinplaced import AT, X, Y, counts, of_an_argument, transposed, zeros
from torch import Tensor

from torchard import Mesh, P, full, jit, place, repeat, shard, trace
from torchard.functional.execution.codegen import compiled
from torchard.functional.execution.donated import donated_parts
from torchard.transforms import op_name


def nested(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    y.view(2, 2, 6)[1][0][2:4] = x[:2]
    return y


def old_is_read(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    return y.select_scatter(x, 0, 1) + y


def view_is_read(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    t = y.t()
    return y.select_scatter(x, 0, 1) + t.sum()


def old_is_returned(y: Tensor, x: Tensor) -> list[Tensor]:
    y = y * 2
    return [y, y.select_scatter(x, 0, 1)]


def part_is_returned(y: Tensor, x: Tensor) -> list[Tensor]:
    y = y * 2
    return [y[1:], y.index_copy(0, AT, x[None])]


def other_part(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    y[0] = y[1]
    y[2:4] = y[0:2]
    return y


def clamped(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    y[1] = torch.clamp(y[1], min=y[0], max=x)
    return y


def overlapping(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    return y.slice_scatter(y[0:3], 0, 1, 4)


def put_elsewhere(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    return y.select_scatter(y[1].index_fill(0, AT, 7), 0, 2)


def of_itself(y: Tensor, x: Tensor) -> Tensor:
    x = x * 2
    return x.index_add(0, torch.arange(5, -1, -1), x)


def read_and_put_back(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    row = y[1].index_fill(0, AT, 7)
    x = x + row.sum()
    y[1] = row
    x = x * row
    y[2] = x
    return y


def put_back_and_written(y: Tensor, x: Tensor) -> list[Tensor]:
    y = y * 2
    row = y[1].index_fill(0, AT, 7)
    y[1] = row
    return [y, row.index_fill(0, AT, 8)]


def put_back_and_read_late(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    row = y[1].index_fill(0, AT, 7)
    y[1] = row
    y[1] = x
    return y + row


def put_back_and_returned(y: Tensor, x: Tensor) -> list[Tensor]:
    y = y * 2
    row = y[1].index_fill(0, AT, 7)
    y[1] = row
    return [y, row]


def put_back_and_copied(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    row = y[1].index_fill(0, AT, 7)
    y[1] = row
    return y.index_copy(0, torch.tensor([0, 1]), torch.stack([row, x]) * 1).index_add(0, AT, row[None])


def with_gaps(y: Tensor, x: Tensor) -> Tensor:
    y = (y * 2)[:, :3]
    return y.index_copy(0, AT, x[None, :3])


def expanded(y: Tensor, x: Tensor) -> Tensor:
    return (x * 2).expand(4, 6).index_copy(0, AT, x[None])


def of_other_strides(y: Tensor, x: Tensor) -> Tensor:
    """torch's result is contiguous here, unlike the operand."""
    return (y * 2).t().index_copy(1, AT, x[:, None])


def broadcast(y: Tensor, x: Tensor) -> Tensor:
    return (x * 2).masked_fill(y > 5, 0.0)


def two_writes(y: Tensor, x: Tensor) -> list[Tensor]:
    y = y * 2
    return [y.index_add(0, AT, x[None]), y.index_fill(1, AT, 7)]


def clones(y: Tensor, x: Tensor) -> Tensor:
    return (y * 2).clone().index_put((AT,), x)


def cleared(y: Tensor, x: Tensor) -> Tensor:
    y = y.clone()
    y[y > 10] = 0
    y[torch.tensor([0, 1])] = x
    return y


# name: function, whether y is donated, operations that write, those whose value is there, copies
CASES: dict[str, tuple[Callable[..., Any], bool, int, int]] = {
    "fresh memory": (zeros, False, 3, 2),
    "part of a part": (nested, False, 1, 2),
    "the old value is read later": (old_is_read, False, 0, 0),
    "a view of the old value is read later": (view_is_read, False, 0, 0),
    "the old value is returned": (old_is_returned, False, 0, 0),
    "a part of the old value is returned": (part_is_returned, False, 0, 0),
    "from one part to another": (other_part, False, 2, 0),
    "an operand by name": (clamped, False, 1, 0),
    "from an overlapping part": (overlapping, False, 0, 0),
    "a part is put elsewhere": (put_elsewhere, False, 1, 0),
    "a part is read and put back": (read_and_put_back, False, 2, 1),
    "a part is put back and written": (put_back_and_written, False, 2, 0),
    "a part is put back and read late": (put_back_and_read_late, False, 2, 0),
    "a part is put back and returned": (put_back_and_returned, False, 1, 0),
    "a part is put back and copied": (put_back_and_copied, False, 3, 0),
    "from itself": (of_itself, False, 0, 0),
    "to memory with gaps": (with_gaps, False, 0, 0),
    "to expanded memory": (expanded, False, 0, 0),
    "through a transpose": (transposed, False, 1, 0),
    "the result has other strides": (of_other_strides, False, 0, 0),
    "the result is larger": (broadcast, False, 0, 0),
    "two writes to one value": (two_writes, False, 1, 0),
    "a clone of what is dead": (clones, False, 1, 1),
    "an argument is copied once": (of_an_argument, False, 1, 0),
    "a donated argument is not": (of_an_argument, True, 2, 0),
    "masks and indices": (cleared, False, 2, 0),
    "masks and indices, donated": (cleared, True, 2, 1),
}


@pytest.mark.parametrize("memory", ["allocated", "planned"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_written(name: str, memory: Any) -> None:
    fn, donated, writes, there = CASES[name]
    run = jit(fn, backend="eager", donate_argnums=0 if donated else (), memory=memory)
    y, x = Y.clone(), X.clone()
    program = run.lower(y, x)
    assert counts(program.graph, donated_parts(program)) == (writes, there)
    want, place = fn(Y, X), y.data_ptr()
    have = run(y, x)
    torch.testing.assert_close(have, want, rtol=0, atol=0)
    assert torch.equal(x, X)
    assert donated or torch.equal(y, Y)
    if donated:
        assert have.data_ptr() == place


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()])
@pytest.mark.parametrize("name", CASES)
def test_values_on_a_mesh(name: str, spec: P) -> None:
    """Where strides are not known before the program runs."""
    fn, donated, *_ = CASES[name]
    mesh = Mesh({"d": 2}, virtual=True)
    step = jit(shard(fn, mesh), backend="eager", donate_argnums=0 if donated else ())
    for _ in range(2):
        have = step(place(Y.clone(), mesh, spec), X)
        torch.testing.assert_close(full(have), fn(Y, X), rtol=0, atol=0)


def test_an_augmented_assignment_is_one_write() -> None:
    def fn(y: Tensor, x: Tensor) -> Tensor:
        y = y * 2
        y[1] += x
        y[0][2:4] *= 3
        return y

    graph = trace(fn)(Y, X).graph
    names = [op_name(node) for node in graph.nodes if node.op == "call_function"]
    scatters = [name.removeprefix("aten.") for name in names if name.endswith("_scatter")]
    assert scatters == ["select_scatter", "slice_scatter", "select_scatter"]
    assert torch.equal(compiled(graph)([Y, X])[0], fn(Y, X))


def rows(x: Tensor, count: int) -> Tensor:
    y = torch.zeros(count, *x.shape)
    for i in range(count):
        y[i] = x + i
    return y


def test_bytes_are_linear_in_the_rows() -> None:
    x = torch.zeros(1024)
    row = 4 * 1024
    for count in (8, 16):
        program = jit(rows, backend="eager").lower(x, count)
        # filled with zeros; x read and a sum written; that read and a row written
        assert program.work.bytes == count * (row + 2 * row + 2 * row)
        assert program.peak == row + count * row + row


def layer(params: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    w, cache = params
    cache = cache.index_copy(0, at, (x @ w)[None])
    return x + cache.sum(0), cache


def decoder(ws: Tensor, caches: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return repeat(layer, (ws, caches), x, at, collect=True)


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_rows_of_a_stack_are_written_where_they_lie(memory: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    ws = torch.randint(-1, 2, (5, 4, 4), generator=draw).double()
    x, have = torch.ones(4).double(), torch.zeros(5, 8, 4).double()
    step, want, place = jit(decoder, backend="eager", donate_argnums=1, memory=memory), have, None
    for i in range(3):
        at = torch.tensor([i])
        one, want = decoder(ws, want, x, at)
        two, have = step(ws, have, x, at)
        assert torch.equal(one, two) and torch.equal(have, want)
        assert place in (None, have.data_ptr())
        place = have.data_ptr()
    program = step.lower(ws, have, x, at)
    assert counts(program.graph, [1]) == (1, 1)
    assert program.peak < ws.nbytes + have.nbytes + 1000


def test_rows_that_are_written_again_are_stacked_apart() -> None:
    """The first values of a row are collected before the row is written again."""

    def twice(params: Any, x: Tensor, at: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        w, cache = params
        first = cache.index_copy(0, at, x[None])
        return x @ w, (first, first.index_fill(0, at, 9))

    def run(ws: Tensor, caches: Tensor, x: Tensor, at: Tensor) -> Any:
        return repeat(twice, (ws, caches), x, at, collect=True)

    args = torch.eye(3).repeat(5, 1, 1), torch.zeros(5, 4, 3), torch.ones(3), AT
    have = jit(run, backend="eager", donate_argnums=1)(args[0], args[1].clone(), *args[2:])
    torch.testing.assert_close(have, run(*args), rtol=0, atol=0)


def test_rows_that_a_later_loop_writes() -> None:
    """Of a stack that nothing holds any more then."""

    def run(x: Tensor, stack: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = repeat(lambda y, x: (x + 1, y.index_fill(0, AT, 1)), stack, x, collect=True)
        return repeat(lambda y, x: (x + 1, y.index_fill(0, AT - 1, 2)), kept, x, collect=True)

    have = jit(run, backend="eager", donate_argnums=1)(X, Y.clone())
    torch.testing.assert_close(have, run(X, Y), rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.index_add(0, AT, X[None]),
        lambda y: y.slice_scatter(y[1:3] + 1, 0, 1, 3),
    ],
)
def test_what_the_next_iteration_writes_to_is_not_written(write: Callable[[Tensor], Tensor]) -> None:
    """Both carries are in one memory, and each is written in an iteration of its own."""

    def run(x: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        return repeat(lambda _, c: (write(c[1]) % 7, c[0]), steps, (x, x))

    have = jit(run, backend="eager", donate_argnums=0)(Y.clone(), torch.zeros(3))
    torch.testing.assert_close(have, run(Y, torch.zeros(3)), rtol=0, atol=0)


def carried(steps: Tensor, y: Tensor) -> Tensor:
    """A buffer that iterations hand on, each with one row more."""
    return repeat(lambda at, y: y.index_put((at,), y[0] + 1), steps, y * 1)


def test_a_carry_is_written() -> None:
    steps = torch.arange(1, 4)
    program = jit(carried, backend="eager").lower(steps, Y)
    assert counts(program.graph, []) == (1, 0)
    assert torch.equal(jit(carried, backend="eager")(steps, Y), carried(steps, Y))
