"""Placed arguments that are like those of the last call have its key; others have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchard import Mesh, MeshTensor, P, place, shard
from torchard.functional.tracing.signature import Known, read

MESH, OTHER = Mesh({"dp": 2}, virtual=True), Mesh({"tp": 2}, virtual=True)
X = torch.arange(8.0).view(4, 2)
SPLIT = P("dp")


def placed(x: torch.Tensor = X, spec: P = SPLIT, mesh: Mesh = MESH) -> MeshTensor:
    return place(x, mesh, spec)


def known(*args: Any) -> Known | None:
    return Known.of(read(args, {}))


def test_equal_arguments_have_the_key_itself() -> None:
    before = known(placed(), {"x": X, "y": placed(spec=P())})
    assert before is not None
    again = read((placed(X + 1), {"x": X.clone(), "y": placed(spec=P())}), {}, before)
    assert again.key is before.key and again.placed and not again.plain
    fresh = read((placed(), {"x": X, "y": placed(spec=P())}), {})
    assert (again.key, again.structure, list(again.traced)) == (
        *(fresh.key, fresh.structure),
        list(fresh.traced),
    )


@pytest.mark.parametrize(
    "other",
    [
        placed(spec=P()),
        placed(spec=P(None, "dp")),
        placed(X[:2]),
        placed(X.double()),
        placed(mesh=OTHER, spec=P("tp")),
        X,
        2.0,
        None,
        (placed(),),
    ],
)
def test_other_arguments_have_other_keys(other: Any) -> None:
    before = known(placed(), X)
    assert before is not None
    for call in ((other, X), (placed(), [other])):
        found = read(call, {}, before)
        assert found.key is not before.key
        assert found.key == read(call, {}).key != before.key


def test_a_static_argument_is_compared_by_the_key() -> None:
    assert known(placed(), "mean") is None


def test_calls_with_other_placements_are_right() -> None:
    run = shard(lambda x: x * 2, MESH)
    for spec in (P("dp"), P("dp"), P(), P(None, "dp"), P("dp")):
        assert torch.equal(run(placed(spec=spec)).full(), X * 2)
