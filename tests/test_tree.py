import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from torchard.functional import tree


class Pair:
    def __init__(self, left: object, right: object, label: str) -> None:
        self.left, self.right, self.label = left, right, label


tree.register(Pair, lambda p: ((p.left, p.right), p.label), lambda label, c: Pair(*c, label))


def test_none_is_a_leaf_and_comes_back():
    nested = {"b": None, "a": (1, [2, None])}
    found, structure = tree.flatten(nested)
    assert found == [1, 2, None, None] == tree.leaves(nested)
    assert tree.unflatten(structure, found) == nested
    assert tree.structure(nested) == structure


def test_map_over_several_trees():
    assert tree.map(lambda x, y: (y, x), {"a": None, "b": 1}, {"a": 2, "b": None}) == {
        "a": (2, None),
        "b": (None, 1),
    }


def test_map_of_different_trees_says_where():
    with pytest.raises(ValueError, match=r"\['w'\]|'w'"):
        tree.map(lambda x, y: x, {"w": [1, 2]}, {"w": [1]})


def test_paths_read_as_python():
    nested = {"w": [1, None], "p": Pair(1, 2, "x")}
    assert tree.paths(nested, "args")[2:] == ["args['w'][0]", "args['w'][1]"]
    assert len(tree.paths(nested)) == len(tree.leaves(nested)) == 4


def test_registered_types_are_nodes_here_and_in_torch():
    pair = Pair(torch.ones(2), {"x": torch.zeros(1)}, "label")
    doubled = tree.map(lambda t: t * 2, pair)
    assert isinstance(doubled, Pair) and doubled.label == "label"
    assert torch.equal(doubled.left, torch.full((2,), 2.0))
    found, spec = torch_pytree.tree_flatten(pair)
    assert len(found) == 2
    assert torch_pytree.tree_unflatten(found, spec).label == "label"
    grads = torch.func.grad(lambda p: (p.left**2).sum() + p.right["x"].sum())(pair)
    assert torch.equal(grads.left, pair.left * 2)


def test_structures_with_other_static_parts_differ():
    assert tree.structure(Pair(1, 2, "a")) != tree.structure(Pair(1, 2, "b"))
    assert tree.structure(Pair(1, 2, "a")) == tree.structure(Pair(3, 4, "a"))


def test_other_namespaces_do_not_see_the_type():
    assert len(optree.tree_leaves(Pair(1, 2, "a"))) == 1


def test_a_type_can_be_registered_once():
    with pytest.raises(ValueError, match="already registered"):
        tree.register(Pair, lambda p: ((), None), lambda static, children: None)
