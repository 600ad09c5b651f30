"""The alphabet of collectives: what is lowered is lowered for all of them, and moves name no others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import fx

from torchard.sharding import Mesh
from torchard.sharding.layouts import collective_ops
from torchard.sharding.layouts.collective_ops import CollectiveOp, CollectiveVisitor
from torchard.sharding.layouts.layout import VARYING, Layout, Sub
from torchard.sharding.lowering import lower_manual, process_group_transport, simulated_transport
from torchard.sharding.manual import manual_collectives
from torchard.sharding.manual.manual_collectives import Enter, Leave, Move, Vary

MESH = Mesh({"a": 2, "b": 3}, virtual=True)
LOWERED_BY = (lower_manual, process_group_transport, simulated_transport)


def alphabet() -> list[type[CollectiveOp]]:
    return CollectiveOp.__subclasses__()


def example(kind: type[Any], **known: Any) -> Any:
    """One of a kind of collective or move, by the types of its fields."""
    values = {
        "axes": ("a", "b"), "manual": ("a", "b"), "size": 6, "pairs": ((0, 1),), "which": "max",
        "at": (0, 0), "to": (1, 0), "dim": 1, "split": 0, "concat": 1, "sources": (0,),
        "targets": (1,), "source": 0, "entries": ("a,b", ""), "counts": (6, 1), "reduction": "sum",
    } | known  # fmt: skip
    return kind(**{name: values[name] for name in inspect.signature(kind).parameters})


class Called(CollectiveVisitor[str]):
    """Says which of its methods was called."""


for _name in sorted(CollectiveVisitor.__abstractmethods__):
    setattr(Called, _name, lambda self, op, name=_name: name)
Called.__abstractmethods__ = frozenset()


def test_each_collective_has_a_method_of_its_own_by_its_name() -> None:
    kinds = [kind.kind for kind in alphabet()]
    assert sorted(kinds) == sorted(CollectiveVisitor.__abstractmethods__)
    for kind in alphabet():
        assert example(kind).accept(Called()) == kind.kind
        assert kind.__name__ in collective_ops.__all__


def test_what_lowers_one_collective_lowers_all() -> None:
    assert {v.__module__ for v in CollectiveVisitor.__subclasses__()} >= {m.__name__ for m in LOWERED_BY}
    for visitor in CollectiveVisitor.__subclasses__():
        assert not visitor.__abstractmethods__, visitor

    class Most(Called):
        pass

    Most.__abstractmethods__ = frozenset({"ppermute"})
    with pytest.raises(TypeError, match="ppermute"):
        Most()


def moves() -> list[Move]:
    same = [example(manual_collectives.Exchange, split=1, concat=1)]
    return [example(kind) for kind in manual_collectives._KINDS] + same


@pytest.mark.parametrize("move", moves(), ids=str)
def test_a_move_names_its_collective(move: Move) -> None:
    """Between layouts made for it, of which each rank holds what the move takes and gives."""
    collective = move.collective
    assert (collective is None) == isinstance(move, (Enter, Leave, Vary))
    if collective is None:
        return
    assert frozenset(collective.axes) == move.over
    node = fx.Graph().placeholder("x")
    local = (12, 36)
    varying = ((a, VARYING) for a in move.axes) if move.takes == "varying" else ()  # type: ignore[attr-defined]
    node.meta["layout"] = Layout(tuple((Sub(n),) for n in local), tuple(varying))
    user = node.graph.call_function(torch.sin, (node,))
    step = lower_manual._step(move, user, MESH)
    assert step is not None and step.collective == collective
    for at in MESH.all_coords():
        assert step.before.local_shape(at, MESH.shape) == local
        assert step.after.local_shape(at, MESH.shape) == move.shape(local)
