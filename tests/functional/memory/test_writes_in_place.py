"""Compiled programs write into donated arguments, such as caches, in place; and rows one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config as inductor_config
from effort import cases
from planned import same
from torch import Tensor, fx
from written_caches import AT, cache, kv, new, places, swapped

from torchard import jit
from torchard.functional.compiling.write_chains import chains
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals import is_mutable
from torchard.functional.torch_internals.operators import aten, c10d

AT_ALL = torch.full((2, 1, 4), 5)


def through(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A write into a view of a cache."""

    def fn(c: Tensor, k: Tensor) -> Tensor:
        c = c.clone()
        part = view(c)
        part.copy_(k.view(-1)[: part.numel()].view(part.shape))
        return c

    return fn


def moved_on(c: Tensor) -> Tensor:
    return torch.slice_scatter(c, c[:, :-1], 1, 1)


ONE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_copy": lambda c, k: c.index_copy(1, AT, k),
    "index_put": lambda c, k: c.index_put((torch.tensor([0, 1]), AT), k[:, 0]),
    "index_put of numbers": lambda c, k: c.index_put((AT * 0,), torch.tensor(3.0).double()),
    "index_add": lambda c, k: c.index_add(1, AT, k),
    "index_fill": lambda c, k: c.index_fill(1, AT, 3),
    "scatter": lambda c, k: c.scatter(1, AT_ALL, k),
    "scatter of a number": lambda c, k: c.scatter(1, AT_ALL, 3),
    "scatter_add": lambda c, k: c.scatter_add(1, AT_ALL, k),
    "scatter_reduce": lambda c, k: c.scatter_reduce(1, AT_ALL, k, "amax"),
    "select_scatter": lambda c, k: torch.select_scatter(c, k[:, 0], 1, 5),
    "slice_scatter": lambda c, k: torch.slice_scatter(c, k, 1, 5, 6),
    "of the old value": lambda c, k: c.index_copy(1, AT, c[:, 3:4] + k),
    "a view of the old value": lambda c, k: moved_on(c),
    "what it reads is what it writes": lambda c, k: c.scatter_add(1, AT_ALL, c[:, 5:6] * 2),
    "after another": lambda c, k: c.index_copy(1, AT, k).index_copy(1, AT - 1, k + 1),
    "of what another wrote": lambda c, k: moved_on(c.index_copy(1, AT, k)),
    "through a view": through(lambda c: c.view(2, 32)[:, 20:24]),
    "through a permutation": through(lambda c: c.transpose(0, 1)[5]),
    "through a row's view": through(lambda c: c[1].view(-1)[20:24]),
    "through a permuted row": through(lambda c: c[1].t()[1:3, 4]),
    "through a column's view": through(lambda c: c[:, 1].unsqueeze(0)[:, :, 1:3]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ONE)
def test_a_write_into_a_donated_argument(name: str) -> None:
    """In its memory for ever, whatever that is written by."""
    fn, c, k = ONE[name], kv(), new()
    run, place = jit(fn, donate_argnums=0), c.data_ptr()
    for _ in range(3):
        want = fn(c.clone(), k)
        c = run(c, k)
        assert torch.equal(c, want) and c.stride() == want.stride()
        assert c.data_ptr() == place and not c._is_view()


class Case(NamedTuple):
    """A function of two caches and a row; and for each result the argument in whose memory it is."""

    fn: Callable[[Tensor, Tensor, Tensor], Any]
    where: list[int | None]


def twice(a: Tensor, b: Tensor, k: Tensor) -> Any:
    written = a.index_copy(1, AT, k)
    return written, written, written.clone()


def with_views(a: Tensor, b: Tensor, k: Tensor) -> Any:
    written = torch.slice_scatter(a, k, 1, 5, 6)
    return written[:, 2:], written, written.view(-1)


def old_and_new(a: Tensor, b: Tensor, k: Tensor) -> Any:
    return a, a.index_copy(1, AT, k), b.index_copy(1, AT, k), b[1]


def read_later(a: Tensor, b: Tensor, k: Tensor) -> Any:
    a2, b2 = a.index_copy(1, AT, k), b.index_copy(1, AT, k)
    return a2, b2, a.sum(), b[:, 5] * a2.sum(), a2[:, 5] * 2


def two_of_one(a: Tensor, b: Tensor, k: Tensor) -> Any:
    return a.index_copy(1, AT, k), a.index_copy(1, AT - 1, k + 1), b


def of_each_other(a: Tensor, b: Tensor, k: Tensor) -> Any:
    a2 = torch.slice_scatter(a, b[:, 5:6], 1, 5, 6)
    return a2, torch.slice_scatter(b, a[:, 5:6], 1, 5, 6)


def a_row_apart(a: Tensor, b: Tensor, k: Tensor) -> Any:
    """A row that is written to, but not into the cache; a write into a part that is returned too."""
    row = a[1].index_copy(0, AT, k[0])
    c = b.clone()
    part = c[1]
    part[3:4] = k[0]
    return a.index_copy(1, AT, k), row, c, part, part.index_copy(0, AT, k[0] + 1)


def converted(a: Tensor, b: Tensor, k: Tensor) -> Any:
    """A conversion to its own dtype, which Inductor takes for the operand itself."""
    old = torch.ops.prims.convert_element_type(a, a.dtype)
    same_row = torch.ops.prims.convert_element_type(b, b.dtype)[:, :1]
    return a.index_copy(1, AT, k), old, b.index_copy(1, AT, same_row)


CASES: dict[str, Case] = {
    "results in another order": Case(swapped, [1, 0]),
    "a result twice, and its copy": Case(twice, [0, 0, None]),
    "views of a result": Case(with_views, [None, 0, 0]),
    "the old value is returned": Case(old_and_new, [0, None, None, None]),
    "the old value is read later": Case(read_later, [0, 1, None, None, None]),
    "two writes into one": Case(two_of_one, [0, None, 1]),
    "each with what the other has": Case(of_each_other, [0, None]),
    "a written row apart": Case(a_row_apart, [0, None, 1, None, None]),
    "converted to its own dtype": Case(converted, [None, None, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_of_several_writes(name: str) -> None:
    """Values are right, results share memory as those of the plain function, and caches stay in place."""
    fn, where = CASES[name]
    run = jit(fn, donate_argnums=(0, 1))
    for delta in range(3):
        a, b, k = kv() + delta, kv().flip(1) - delta, new()
        want, arguments = fn(a.clone(), b.clone(), k), places([a, b])
        have = run(a, b, k)
        assert same(have, want) and [x.stride() for x in have] == [x.stride() for x in want]
        found = [arguments.index(p) if p in arguments else None for p in places(have)]
        assert found == where


OTHERWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "into another row": lambda c, k: torch.select_scatter(c, c[0].index_copy(0, AT - 3, k), 0, 1),
    "in another order": lambda c, k: torch.select_scatter(
        c, torch.select_scatter(c[1].permute(1, 2, 0), k[0], 0, 2).permute(1, 2, 0), 0, 1
    ),
    "in another shape": lambda c, k: torch.select_scatter(
        c, c[1].transpose(0, 1).reshape(16, 4).index_copy(0, AT, k[0, :1]).view(4, 4, 4), 0, 1
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_written_back_where_it_was(name: str) -> None:
    fn, k = OTHERWISE[name], torch.full((1, 4, 4), 9.0).double()
    run = jit(fn, donate_argnums=0)
    for _ in range(2):
        c = cache(2, 4, 4, 4)
        assert torch.equal(run(c, k), fn(cache(2, 4, 4, 4), k))


DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Complex numbers are computed by torch, out of place."""

    def fn(c: Tensor, d: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return c.index_copy(1, AT, k), torch.slice_scatter(d, k, 1, 5, 6)

    run, k = jit(fn, donate_argnums=(0, 1)), new(dtype)
    c, d = kv(dtype=dtype), kv(dtype=dtype)
    place = places([c, d])
    for _ in range(2):
        want = fn(c.clone(), d.clone(), k)
        c, d = run(c, d, k)
        assert torch.equal(c, want[0]) and torch.equal(d, want[1])
    assert dtype.is_complex or places([c, d]) == place


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda c: c.transpose(0, 1),
    "with gaps": lambda c: torch.cat([c, c])[::2],
    "expanded": lambda c: c[:1].expand(2, 8, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """What is dense is written in place; what is not, or has an element several times, never."""
    fn = through(lambda c: c[1, 2:3])
    run = jit(fn, donate_argnums=0)
    for _ in range(2):
        c = LAYOUTS[layout](kv())
        whole = c._base if c._is_view() else c
        if layout == "transposed":
            c = c.clone()
            whole = c
        kept, want, place = whole.clone(), fn(c.clone(), new()), c.data_ptr()
        have = run(c, new())
        assert torch.equal(have, want)
        assert (have.data_ptr() == place) == (layout == "transposed")
        assert layout == "transposed" or torch.equal(whole, kept)


# -- what runs before a write ------------------------------------------------------------------------


def operation(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    VAL.set(node, torch.empty(2, 8, 4, device="meta"))
    return node


@pytest.mark.parametrize("late", [False, True])
def test_a_collective_has_read_a_cache_when_it_is_awaited(late: bool) -> None:
    """A write cannot come before, and a collective is not moved: ranks agree on the order of these."""
    graph = fx.Graph()
    start = graph.placeholder("donated_0")
    VAL.set(start, torch.empty(2, 8, 4, device="meta"))
    sent = operation(graph, c10d.all_reduce.default, start, "sum", "0")
    waits = [] if late else [operation(graph, c10d.wait_tensor.default, sent)]
    written = operation(graph, aten.index_put.default, start, [None], start)
    waits += [operation(graph, c10d.wait_tensor.default, sent)] if late else []
    graph.output((written, *waits))
    found = [chain.donated for chain in chains(graph, [start])]
    assert found == [not late]


# -- rows one by one ---------------------------------------------------------------------------------

Graphs = list[fx.Graph]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The graphs that Inductor lowers, with writes in place."""
    module = importlib.import_module("torchard.functional.jit")
    before, seen = module.write_in_place, []

    def keep(graph: fx.Graph) -> None:
        before(graph)
        seen.append(fx.Graph())
        seen[-1].graph_copy(graph, {})

    keep.__module__ = before.__module__
    monkeypatch.setattr(module, "write_in_place", keep)
    with inductor_config.patch(force_disable_caches=True):  # else a graph may not be lowered again
        yield seen


def rows(x: Tensor, n: int) -> Tensor:
    y = x.new_zeros(n, len(x))
    for i in range(n):
        x = x * 2 + i
        y[i] = x
    return y


def added(x: Tensor, n: int) -> Tensor:
    y = x.new_zeros(n, len(x))
    for i in range(n):
        y[i % 4].add_(x)
    return y


def running(x: Tensor, n: int) -> Tensor:
    y = x.new_zeros(n, len(x))
    for i in range(n):
        y[i] = y[i - 1] + x
    return y


@pytest.mark.parametrize("fn", [rows, added, running])
@pytest.mark.parametrize("n", cases([4, 16], [32]))
def test_rows_are_written_one_by_one(fn: Callable[..., Tensor], n: int, graphs: Graphs) -> None:
    """Each once, however many: what is written does not grow with their square."""
    x = torch.arange(8192.0) % 5
    assert torch.equal(jit(fn)(x, n), fn(x, n))
    (graph,) = graphs
    writes = [node for node in graph.nodes if is_mutable(node.target)]
    scatters = [node for node in graph.nodes if node.target is aten.select_scatter.default]
    assert (len(writes), len(scatters)) == ((n, 0) if n > 4 else (0, n))


def test_rows_of_small_values(graphs: Graphs) -> None:
    """One kernel computes all of a small value in less time than a kernel takes to be called."""
    x = torch.arange(8.0)
    assert torch.equal(jit(rows)(x, 16), rows(x, 16))
    assert not any(is_mutable(node.target) for graph in graphs for node in graph.nodes)


def test_rows_of_an_argument_that_is_kept() -> None:
    def fn(y: Tensor, x: Tensor) -> Tensor:
        y = y.clone()
        for i in range(len(y)):
            y[i] = y[i - 1] + x
        return y

    y, x = cache(16, 8192), torch.ones(8192).double()
    kept = y.clone()
    assert torch.equal(jit(fn)(y, x), fn(y, x)) and torch.equal(y, kept)


def test_rows_of_what_was_written_in_place() -> None:
    """A result in the memory of an argument is copied once, and then written to row by row."""

    def fn(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = c.index_copy(0, AT, x[None])
        y = c.clone()
        for i in range(len(y)):
            y[i] = y[i - 1] + x
        return c, y

    c, x = cache(16, 8192), torch.ones(8192).double()
    want, place = fn(c.clone(), x), c.data_ptr()
    have = jit(fn, donate_argnums=0)(c, x)
    assert same(have, want) and have[0].data_ptr() == place
