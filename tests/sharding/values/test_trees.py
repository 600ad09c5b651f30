"""A placed value is one leaf of users' trees: functions of torchard.tree equal those on full values."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

from torchard import Mesh, P, PlacementError, full, place, shard, tree

MESH = Mesh({"tp": 2}, virtual=True)
FULL = {"w": torch.arange(8.0).view(4, 2), "n": torch.arange(4), "b": [torch.ones(2), None]}
PLACED = {
    "w": place(FULL["w"], MESH, P("tp")),
    "n": place(FULL["n"], MESH, P("tp")),
    "b": [place(torch.ones(2), MESH, P()), None],
}


def _scaled(leaf: Any) -> Any:
    return leaf if leaf is None else leaf / (leaf * 1.0).norm()


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "map": lambda t: tree.map(_scaled, t),
    "map of two": lambda t: tree.map(lambda a, b: None if a is None else a * b.sum(), t, t),
    "flatten": lambda t: tree.flatten(tree.map(_scaled, t))[0],
    "leaves": lambda t: [_scaled(leaf) for leaf in tree.leaves(t)],
    "unflatten": lambda t: tree.unflatten(tree.structure(t), map(_scaled, tree.leaves(t))),
    "partition": lambda t: tree.map(_scaled, tree.partition(t)[0]),
    "combine": lambda t: tree.combine(*tree.partition(tree.map(_scaled, t))),
    "broadcast": lambda t: [
        a if a is None else a * k
        for a, k in zip(tree.leaves(t), tree.broadcast({"w": 1, "n": 2, "b": 3}, t), strict=True)
    ],
    "is_leaf": lambda t: tree.map(
        lambda a: a[0] * 2 if isinstance(a, list) else a, t, is_leaf=lambda a: isinstance(a, list)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_placed_tree_is_that_of_the_full_one(name: str) -> None:
    function = FUNCTIONS[name]
    want = tree.leaves(function(FULL))
    for have in (
        function(PLACED),
        shard(function, MESH)(PLACED),
        shard(lambda: function(PLACED), MESH)(),
    ):
        for one, other in zip(tree.leaves(have), want, strict=True):
            torch.testing.assert_close(full(one), other)


def test_paths_and_structures_do_not_look_into_placed_values() -> None:
    assert tree.paths(PLACED) == tree.paths(FULL)
    assert tree.structure(PLACED) == tree.structure(FULL)


def test_full_gathers_a_tree() -> None:
    gathered = full(PLACED)
    assert tree.structure(gathered) == tree.structure(FULL)
    for one, other in zip(tree.leaves(gathered), tree.leaves(FULL), strict=True):
        assert one is other is None or torch.equal(one, other)


OTHER_TREES: dict[str, Callable[[Any], Any]] = {
    "torch": lambda t: torch_pytree.tree_map(_scaled, t),
    "torch's leaves": torch_pytree.tree_leaves,
    "optree": lambda t: optree.tree_map(_scaled, t, namespace=tree.NAMESPACE),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OTHER_TREES)
def test_other_trees_look_into_no_placed_value(name: str) -> None:
    with pytest.raises(PlacementError, match=r"was flattened: .* Use torchard\.tree"):
        OTHER_TREES[name]({"w": PLACED["w"]})
    if name == "torch":  # in a trace it is one tensor
        have = shard(OTHER_TREES[name], MESH)({"w": PLACED["w"]})
        torch.testing.assert_close(full(have)["w"], _scaled(FULL["w"]))
    found = torch.func.grad(lambda t: shard(lambda t: t["w"].square().sum(), MESH)(t))(
        {"w": PLACED["w"]}
    )
    torch.testing.assert_close(full(found)["w"], 2 * FULL["w"])
