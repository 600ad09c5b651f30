"""Program: running it, reading it, copying it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from torchard import Mesh, P, shard
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program, Records
from torchard.functional.trace import scope, trace


def mlp(w: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with scope("mlp"):
        h = torch.relu(x @ w)
    return {"out": h.sum(-1), "max": h.max(1).values}


@pytest.fixture
def program() -> Program:
    return trace(mlp)(torch.randn(4, 3), torch.randn(2, 4))


def test_bound_equals_the_function(program: Program) -> None:
    w, x = torch.randn(4, 3), torch.randn(2, 4)
    expected = mlp(w, x)
    for got, want in zip(program.bind()([w, x]), (expected["max"], expected["out"]), strict=True):
        assert got.equal(want)


def test_bound_takes_constants_of_every_kind() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = torch.clamp(x, min=float("-inf"), max=float("inf"))
        y = torch.cat([y[..., 1:], y.flip([0, 1])], 1).to(torch.bfloat16)
        parts = y.split([2, 2, 3], 1)
        return parts[1].to(torch.float32, memory_format=torch.contiguous_format), y[:, None]

    x = torch.randn(2, 4)
    for got, want in zip(trace(fn)(x).bind()([x]), fn(x), strict=True):
        assert got.equal(want)


def test_a_list_of_inputs_is_emptied_and_a_tuple_is_not(program: Program) -> None:
    parts = [torch.randn(4, 3), torch.randn(2, 4)]
    kept = tuple(parts)
    program.bind()(kept)
    assert len(kept) == 2
    program.bind()(parts)
    assert parts == []


def test_values_die_after_their_last_use() -> None:
    alive: list[int] = []
    refs: list[Any] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        refs.append(weakref.ref(x))
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))
        return x + 1

    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(5):
        node = graph.call_function(watch, (node,))
    graph.output((node,))
    bind(Program(graph, (), ()))([torch.zeros(2)])
    assert alive == [1] * 5


def test_deep_graphs_do_not_recurse() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(5000):
        node = graph.call_function(torch.ops.aten.add.Tensor, (node, 1))
    graph.output((node,))
    (result,) = bind(Program(graph, (), ()))([torch.zeros(())])
    assert result == 5000
    assert len(Program(graph, (), ()).copy().calls) == 5000


def test_it_prints_one_aligned_line_per_node(program: Program) -> None:
    lines = str(program).splitlines()
    assert lines[0] == "def mlp:"
    assert lines[-2:] == ["    getitem  # out['max']", "    sum_1  # out['out']"]
    line = next(line for line in lines if "relu" in line)
    assert "f32[2, 3]" in line and "test_program.py:" in line and "in mlp" in line
    assert "scope=mlp" in line
    assert len({text.index("#") for text in lines[1:-3]}) == 1


def test_a_copy_is_independent(program: Program) -> None:
    other = program.copy()
    other.calls[0].meta["layout"] = "R"
    assert "layout" not in program.calls[0].meta
    assert other.calls[0].meta["val"] is program.calls[0].meta["val"]


def test_tags_are_listed(program: Program) -> None:
    class Sent:
        def __init__(self, size: int) -> None:
            self.size = size

        @classmethod
        def table(cls, records: list[Any]) -> str:
            return f"total {sum(record.size for record in records)}"

    marked = program.copy()
    marked.calls[0].meta["collective"] = Sent(3)
    marked.calls[1].meta.update(collective=Sent(4), use="BiasGeLU")
    marked.calls[0].meta["apart"] = "RMSNorm, taken apart"
    assert [record.size for record in marked.collectives] == [3, 4]
    assert str(marked.collectives) == "total 7"
    assert marked.kernels == ["BiasGeLU", "RMSNorm, taken apart"]
    assert str(Records()) == "none"


def test_work_without_a_mesh() -> None:
    work = trace(lambda x, w: (x @ w).relu())(torch.ones(2, 3), torch.ones(3, 4)).work
    assert (work.flops, work.bytes) == (2 * 2 * 3 * 4 + 8, 4 * (6 + 12 + 8 + 8 + 8))
    assert str(work).splitlines() == [
        "            ranks  FLOPs  bytes",
        "one device      1     56    168",
    ]


def test_a_plan_says_where_gradients_stop() -> None:
    mesh = Mesh({"tp": 2}, virtual=True)
    plan = shard(lambda x: x * x.sin().detach(), mesh, in_specs=(P("tp"),)).lower(torch.ones(4))
    (line,) = (line for line in str(plan).splitlines() if "= detach(" in line)
    assert "cut" in line


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_rarely_looked_for_while_a_graph_is_made(on: bool) -> None:
    """Whether at all is for the user to say, also meanwhile; so is the threshold."""
    seen: list[Any] = []

    def fn(x: torch.Tensor, what: Any) -> torch.Tensor:
        seen.append((gc.isenabled(), gc.get_threshold()[0] > before[0]))
        what()
        return x.sin()

    before, was = gc.get_threshold(), gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        trace(fn)(torch.ones(3), list)
        with pytest.raises(ZeroDivisionError):
            trace(fn)(torch.ones(3), lambda: 1 / 0)
        assert seen == [(on, True)] * 2 and gc.isenabled() == on and gc.get_threshold() == before
        trace(fn)(torch.ones(3), gc.disable if on else gc.enable)
        assert gc.isenabled() != on
        trace(fn)(torch.ones(3), lambda: gc.set_threshold(500, 5, 5))
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*before)
        (gc.enable if was else gc.disable)()
