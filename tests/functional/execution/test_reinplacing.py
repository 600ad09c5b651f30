"""Writes in place: which ones are made, that values stay the same, and that nobody else sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile

from torchard import Mesh, P, full, jit, place, repeat, shard, trace
from torchard.functional.execution.codegen import compiled
from torchard.functional.execution.donated import donated_parts
from torchard.functional.execution.sequencing import what_runs
from torchard.transforms import op_name

Y = torch.arange(24.0).reshape(4, 6)
X = torch.arange(1.0, 7.0)
AT = torch.tensor([2])


def counts(graph: fx.Graph, donated: list[int]) -> tuple[int, int]:
    """How many operations write, and how many have their value there already."""
    nodes = what_runs(graph, donated)[1].nodes
    return sum(not there for there in nodes.values()), sum(nodes.values())


def zeros(y: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[0] = x
    z[1, 2:4] = 1
    z[:, 5] += 3
    return z


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


def transposed(y: Tensor, x: Tensor) -> Tensor:
    return (y * 2).t().index_put((torch.arange(6)[:, None], AT), x[:, None]).t()


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


def of_an_argument(y: Tensor, x: Tensor) -> Tensor:
    return y.index_put((AT,), x).scatter(0, AT[None], 1.0)


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


def allocated(run: Callable[[], Any]) -> list[int]:
    """The sizes of what a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    sizes = (event.cpu_memory_usage for event in found.events() or [])
    return [size for size in sizes if size > 0]


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_a_donated_cache_is_never_copied(memory: Any) -> None:
    def write(cache: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cache = cache.index_copy(1, at, x[:, None])
        return cache, cache[:, 0].sum()

    step = jit(write, backend="eager", donate_argnums=0, memory=memory)
    cache = torch.zeros(4, 64, 8)
    want, place = cache.clone(), cache.data_ptr()
    for i in range(3):
        at, x = torch.tensor([i]), torch.full((4, 8), i + 1.0)
        held = [cache]
        del cache
        sizes = allocated(lambda: held.append(step(held.pop(), at, x)[0]))  # noqa: B023
        (cache,) = held
        want.index_copy_(1, at, x[:, None])
        assert torch.equal(cache, want) and cache.data_ptr() == place
        assert i == 0 or max(sizes) < cache.nbytes
    assert step.lower(cache, at, x).peak < 1.5 * cache.nbytes


@pytest.mark.parametrize("hold", [lambda y: y[0], lambda y: y.view(-1), lambda y: y.t()])
def test_what_others_hold_of_a_donated_argument_is_not_written(hold: Callable[..., Any]) -> None:
    step = jit(of_an_argument, backend="eager", donate_argnums=0)
    for _ in range(2):
        y = Y.clone()
        held, before = hold(y), hold(y).clone()
        have = step(y, X)
        assert torch.equal(held, before)
        assert torch.equal(have, of_an_argument(Y, X))


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


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_under_transforms_of_torch(transform: str) -> None:
    """What a transform has to see is not written: a base has no batch, where a row may have one."""
    graph = trace(zeros)(Y, X).graph
    assert counts(graph, []) == (3, 2)
    run = compiled(graph)

    def fn(x: Tensor) -> Tensor:
        return run((Y, x))[0]

    xs = torch.stack([X, 2 * X])
    want = torch.stack([zeros(Y, x) for x in xs])
    if transform == "vmap":
        assert torch.equal(torch.func.vmap(fn)(xs), want)
    elif transform == "jvp":
        value, tangent = torch.func.jvp(fn, (X,), (X,))
        assert torch.equal(value, want[0]) and torch.equal(tangent[0], X)
    else:
        assert torch.equal(torch.func.grad(lambda x: (fn(x)[0] * X).sum())(X), X)


def test_where_autograd_follows() -> None:
    """What autograd has saved is not written."""

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y[2] = 2.0
        return y

    x = X.clone().requires_grad_()
    graph = trace(fn)(X).graph
    assert counts(graph, []) == (1, 0)
    (grad,) = torch.autograd.grad(compiled(graph)([x])[0].sum(), x)
    assert torch.equal(grad, X.exp().index_fill(0, AT, 0.0))


class _ByProgram(torch.autograd.Function):
    """The identity, whose backward is a program that writes the cotangent into a row."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return compiled(trace(zeros)(Y, X).graph)((Y, cotangent))[0][0]


def test_batched_cotangents() -> None:
    """A row with a batch is not written into a buffer without one."""
    x = X.clone().requires_grad_()
    y: Any = _ByProgram.apply(x)
    (grads,) = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True)
    assert torch.equal(grads[:, :5], torch.eye(6)[:, :5])


KEPT: list[Tensor] = []
BUFFER = torch.zeros(4, 6)


@torch.library.custom_op("torchard_writes::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """A function that keeps its operand."""
    KEPT.append(x)
    return x.sum()


@torch.library.custom_op("torchard_writes::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    """A function that returns the same memory in each call."""
    return BUFFER


keep.register_fake(lambda x: x.new_empty(()))
constant.register_fake(lambda x: x.new_empty(4, 6))


def kept(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    x = x + keep(y)
    y[0] = x
    return y


def of_a_constant(y: Tensor, x: Tensor) -> Tensor:
    y = constant(y)
    return y.index_copy(0, AT, x[None])


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_memory_that_functions_keep_is_not_written(memory: Any) -> None:
    y = jit(kept, backend="eager", memory=memory)(Y, X)
    assert torch.equal(KEPT.pop(), 2 * Y) and torch.equal(y[0], X + 2 * Y.sum())
    have = jit(of_a_constant, backend="eager", memory=memory)(Y, X)
    assert torch.equal(have[2], X) and not BUFFER.any()


@pytest.mark.parametrize("memory", ["allocated", "planned"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Y.clone()[:, :5],
        lambda: Y.clone().t(),
        lambda: X.clone().expand(4, 6),
        lambda: torch.complex(Y, Y).conj(),
    ],
)
def test_donated_arguments_of_any_layout(make: Callable[[], Tensor], memory: Any) -> None:
    def fn(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y.index_copy(0, AT, (x[: y.shape[1]] + y[0])[None])
        return y, y.view(-1) if y.is_contiguous() else y.reshape(-1)

    step = jit(fn, backend="eager", donate_argnums=0, memory=memory)
    for _ in range(2):
        want, have = fn(make(), X), step(make(), X)
        torch.testing.assert_close(have, want, rtol=0, atol=0)
        assert [x.stride() for x in have] == [x.stride() for x in want]


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_donated_inference_tensors(memory: Any) -> None:
    step = jit(of_an_argument, backend="eager", donate_argnums=0, memory=memory)
    with torch.inference_mode():
        y, again = Y.clone(), Y.clone()
        assert torch.equal(step(again, X), of_an_argument(Y, X))
    assert torch.equal(step(y, X), of_an_argument(Y, X))


def test_results_that_share_memory_stay_views() -> None:
    """Autograd notices writes to one through the other; a single one can be donated again."""

    def two(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y.t().index_copy(1, AT, x[:, None]).t()
        return y, y[0]

    y, row = jit(two, backend="eager", donate_argnums=0)(Y.clone(), X)
    w = torch.ones(6, requires_grad=True)
    product = (row * w).sum()
    y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    step = jit(transposed, backend="eager", donate_argnums=0)
    y = step(Y.clone(), X)
    place = y.data_ptr()
    assert transposed(Y, X).equal(y)
    del product, row
    assert step(y, X).data_ptr() != place  # the product is new


def test_halves_write_what_is_their_own() -> None:
    """What the forward saves is not written by the backward, whose peak says so."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).exp()  # saved
        return (y * w).sum()

    program = jit(torch.func.grad(loss), backend="eager").lower(X, X)
    assert program.peak > 0
    joint = jit(lambda x: zeros(Y, x.sin()).square().sum(), backend="eager").lower_joint(X)
    assert joint.peak >= 2 * Y.nbytes
