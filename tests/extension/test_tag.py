"""Tags declared against public names: what follows what, through traces, gradients, plans and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from torchard import Mesh, P, checkpoint, shard, trace
from torchard.transforms import Program, Rewrite, Tag, TagError, Transformed, declare, inherit

FOLLOWS = ("node", "call", "value", "place")
MARKS: dict[str, Tag[str]] = {
    follows: declare(f"extension_{follows}", "what was marked", follows=follows)  # type: ignore[arg-type]
    for follows in FOLLOWS
}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
W, X = torch.ones(64, 32), torch.ones(128, 64)


@dataclass(frozen=True)
class Mark(Rewrite):
    """Marks every operation, where the function is called inside a trace."""

    def __call__(self, program: Program) -> Program:
        return program

    def inline(self, program: Program) -> Program:
        program = program.copy()
        for node in program.calls:
            for tag in MARKS.values():
                tag.set(node, str(node.target))
        return program


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(x @ w, 1).sin() - x.sum()).mean()


def marked(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inner: Loss = Transformed(loss, [Mark()])
    return inner(w, x)


def on(nodes: Sequence[fx.Node]) -> set[str]:
    """What all of these have."""
    assert nodes
    return {follows for follows, tag in MARKS.items() if all(map(tag.on, nodes))}


def nowhere(nodes: Sequence[fx.Node]) -> set[str]:
    return {follows for follows, tag in MARKS.items() if not any(map(tag.on, nodes))}


def test_a_copy_of_the_graph_has_all() -> None:
    made = Mark().inline(trace(loss)(W, X))
    assert on(made.copy().calls) == set(FOLLOWS)


def test_what_is_replayed_in_a_trace_has_what_follows_the_call() -> None:
    calls = trace(marked)(W, X).calls
    assert on(calls) == {"call", "value", "place"} and nowhere(calls) == {"node"}
    again = trace(Transformed(marked, []))(W, X).calls
    assert on(again) == {"call", "value", "place"}


def test_a_gradient_has_what_follows_the_place() -> None:
    program = Transformed(marked, []).lower_joint(W, X)
    backward = [node for node in program.calls if not MARKS["call"].on(node)]
    assert len(backward) > 8
    assert on(backward) == {"place"} and nowhere(backward) == {"node", "call", "value"}


def test_what_is_recomputed_has_what_follows_the_call() -> None:
    program = checkpoint(marked).lower_joint(W, X)
    softmaxes = program.graph.find_nodes(op="call_function", target=torch.ops.aten._softmax.default)
    assert len(softmaxes) == 2
    assert on(softmaxes) == {"call", "value", "place"} and on(program.calls) == {"place"}


@pytest.mark.parametrize("joint", (False, True), ids=["forward", "joint"])
def test_ranks_have_what_follows_the_place(joint: bool) -> None:
    """Operations of a plan, those that take their place (a softmax over a split dim) and collectives."""
    run = shard(marked, Mesh({"tp": 2}, virtual=True), in_specs=(P(None, "tp"), P()))
    program = run.lower_joint(W, X) if joint else run.lower(W, X)
    assert program.collectives and not program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._softmax.default
    )
    assert program.runtime is not None
    for calls in (program.calls, program.runtime.graph(program).graph.nodes):
        calls = [node for node in calls if node.op == "call_function" and not _of_input(node)]
        assert len(calls) > 10 and "place" in on(calls) and "node" in nowhere(calls)
    sin, exp = torch.ops.aten.sin.default, torch.ops.aten.exp.default
    assert on(program.graph.find_nodes(op="call_function", target=sin)) == {"call", "value", "place"}
    assert on(program.graph.find_nodes(op="call_function", target=exp)) == {"place"}


def _of_input(node: fx.Node) -> bool:
    """Whether it only splits an argument as it was asked for, on no operation's account."""
    return all(operand.op == "placeholder" for operand in node.all_input_nodes) and "slice" in node.name


def test_a_name_is_taken_once_and_what_is_missing_is_named() -> None:
    with pytest.raises(TagError, match=r"already, at extension/test_tag\.py:\d+: what was"):
        declare("extension_call", "another")
    one, other = trace(loss)(W, X).calls[:2]
    MARKS["place"].set(one, "here")
    inherit(other, one)
    assert MARKS["place"].of(other) == "here"
    with pytest.raises(TagError, match="no tag 'extension_call': what was marked"):
        MARKS["call"].of(one)
