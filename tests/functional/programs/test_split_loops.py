"""Loops in two parts compute what they did: node by node when unrolled, bit by bit when run."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from effort import examples
from random_loops import random_program
from torch import fx
from torch.func import grad

from torchard import trace
from torchard.functional.execution.binding import bind
from torchard.functional.loops import equal_layers as limits
from torchard.functional.loops.recognised import recognised
from torchard.functional.programs.program import Program
from torchard.functional.programs.split_loops import related_loops, split_loops
from torchard.functional.programs.tags import LOOP, SCOPE, SOURCE, VAL
from torchard.functional.programs.unrolled import has_loops, unrolled

COUNT = examples(ci=20, explore=2000)


@pytest.fixture(autouse=True)
def few_operations_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are rolled, too."""
    monkeypatch.setattr(limits, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(limits, "MIN_SAVED", 1)


def facts(program: Program) -> list[Any]:
    """All that a program's nodes are, by number."""
    number = {node: i for i, node in enumerate(program.graph.nodes)}

    def fact(node: fx.Node) -> Any:
        args = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{number[operand]}")
        val = VAL.get(node)
        shape = tuple(val.shape) if isinstance(val, torch.Tensor) else None
        return node.op, str(node.target), repr(args), shape, SCOPE.get(node), SOURCE.get(node)

    return [fact(node) for node in program.graph.nodes]


def in_two(program: Program, rng: Random) -> Program:
    """The program with some of its loops in two, if they have two iterations."""
    at = {}
    for group in related_loops(program.graph):
        span = group[0].span
        assert {loop.span for loop in group} == {span}
        if len(span) > 1 and rng.random() < 0.9:
            at.update(dict.fromkeys(group, rng.choice(span[1:])))
    split, copies = split_loops(program, at)
    split.graph.lint()
    assert set(copies) == set(program.graph.nodes)
    for node, (one, other) in copies.items():
        assert (one is not other) == (LOOP.get(node) in at)
    return split


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(0, COUNT, 10))
def test_two_parts_are_the_loop(first: int) -> None:
    """Whichever row they are split at; and parts of parts."""
    found = 0
    for seed in range(first, first + 10):
        program, args = random_program(seed)
        if not has_loops(program):
            continue
        found += 1
        rng = Random(seed)
        once = in_two(program, rng)
        for split in (once, in_two(once, rng)):
            if not any(node.target.__name__ == "total" for node in program.calls):  # type: ignore[union-attr]
                assert facts(unrolled(split)) == facts(unrolled(program)), seed
            for have, want in zip(bind(split)(args), bind(program)(args), strict=True):
                assert torch.equal(have, want), seed
    assert found > 3


def test_loops_that_read_each_others_rows_are_related() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws[:5]:
            x = torch.sin(x @ w) * x
        x = x.flip(0).sin()
        for w in ws[5:]:
            x = torch.cos(x @ w) * x
        return x.sum()

    ws = list(torch.randn(11, 2, 2))
    program = recognised(trace(grad(fn))(ws, torch.ones(2, 2)))
    groups = related_loops(program.graph)
    assert [[(loop.count, loop.reverse) for loop in group] for group in groups] == [
        [(4, False), (4, True)],
        [(5, False), (5, True)],
    ]
