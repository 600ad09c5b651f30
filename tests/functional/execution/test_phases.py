"""The order in which the iterations of a loop issue and await collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from torchard.functional.execution.codegen import compiled
from torchard.functional.execution.instructions import Compute, executed
from torchard.functional.execution.sequencing import instructions_of
from torchard.functional.programs.loops import issued_ahead, regrouped
from torchard.functional.programs.markers import Loop, again, enter, leave, row, rows
from torchard.functional.programs.tags import AHEAD, LOOP, STAGE

Events = list[tuple[str, int]]


def graph_of(loop: Loop, events: Events, ahead: int, scattered: bool) -> fx.Graph:
    """x = x * 2 + the row of w, gathered; each x is scattered, and the scattered are stacked.

    A row of w is its number, so that events can tell which iteration they belong to.
    """
    graph = fx.Graph()

    def event(what: str) -> Any:
        def run(value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            events.append((what, int(number)))
            return value.clone()

        run.__name__ = what
        return run

    def call(target: Any, *args: Any, **tags: Any) -> fx.Node:
        node = graph.call_function(target, args)
        LOOP.set(node, loop)
        for tag, value in tags.items():
            {"ahead": AHEAD, "stage": STAGE}[tag].set(node, value)
        return node

    w, x = graph.placeholder("w"), graph.placeholder("x")
    entered = call(enter, x)
    taken = call(row, w)
    issued = call(event("gather"), taken, taken, ahead=ahead, stage="issue")
    arrived = call(event("arrives"), issued, issued, ahead=ahead, stage="wait")
    new = call(torch.add, call(torch.mul, entered, 2), call(event("computes"), arrived, taken))
    results = [call(again, new, entered)]
    if scattered:
        sent = call(event("scatter"), arrived, arrived, stage="issue")
        results.append(call(event("scattered"), sent, sent, stage="wait"))
    last = graph.call_function(leave, (results[0],))
    stacked = [graph.call_function(rows, (value, loop.count)) for value in results[1:]]
    graph.output((last, *stacked))
    return graph


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_order_of_events(count: int, ahead: int, reverse: bool, scattered: bool) -> None:
    ahead = min(ahead, count - 1)
    loop, events = Loop(count, reverse, "layer"), Events()
    graph = graph_of(loop, events, ahead, scattered)
    run = compiled(graph)
    w = torch.arange(count)
    results = run([w, torch.tensor(1)])

    order = list(loop.order())
    wanted = [("gather", i) for i in order[:ahead]]
    x = torch.tensor(1)
    for turn, i in enumerate(order):
        x = 2 * x + i
        wanted += [("gather", i)] if not ahead else []
        wanted += [("arrives", i)]
        wanted += [("gather", order[turn + ahead])] if ahead and turn + ahead < count else []
        wanted += [("computes", i)]
        wanted += [("scatter", i)] if scattered else []
        wanted += [("scattered", order[turn - 1])] if scattered and turn else []
    wanted += [("scattered", order[-1])] if scattered else []
    assert events == wanted, run.__doc__
    walk = executed(instructions_of(regrouped(graph)))  # as memory's readers do
    computed = [(each.node.target, i) for each, i in walk if isinstance(each, Compute)]
    assert [(f.__name__, i) for f, i in computed if f.__module__ == __name__] == wanted
    assert torch.equal(results[0], x)
    assert not scattered or torch.equal(results[1], w)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_that_only_gathers(reverse: bool) -> None:
    """Without a carry, and with nothing to do but wait."""
    loop, events = Loop(4, reverse, "layer"), Events()
    graph = graph_of(loop, events, 1, scattered=False)
    arrived = next(node for node in graph.nodes if STAGE.get(node) == "wait")
    graph.erase_node(graph.output_node())
    for node in reversed([n for n in graph.nodes if n.op == "call_function" and n > arrived]):
        graph.erase_node(node)
    graph.erase_node(next(node for node in graph.nodes if node.target is enter))
    graph.output((graph.call_function(rows, (arrived, loop.count)),))
    (stacked,) = compiled(graph)([torch.arange(4), torch.tensor(1)])
    assert torch.equal(stacked, torch.arange(4))
    assert [i for what, i in events if what == "arrives"] == list(loop.order())


def test_nothing_is_issued_ahead_that_depends_on_a_carry() -> None:
    loop = Loop(3, reverse=False, name="layer")
    graph = graph_of(loop, Events(), 1, scattered=False)
    nodes = [node for node in graph.nodes if LOOP.on(node)]
    assert next(iter(issued_ahead(nodes)[0])).target is row
    gather = next(node for node in nodes if STAGE.get(node) == "issue")
    gather.update_arg(0, nodes[0])
    assert issued_ahead(nodes) == ([], 0)
