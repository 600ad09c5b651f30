import dataclasses
import itertools
from typing import Any

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import torchard as ta
from torchard.functional.core import tree


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


# -- dataclasses ------------------------------------------------------------------------------------


@tree.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    steps: Any
    act: str = dataclasses.field(default="tanh", metadata={"static": True})


@tree.register_dataclass
@dataclasses.dataclass(frozen=True)
class Net:
    layers: list[Layer]
    scale: Any


MESH = ta.Mesh({"a": 2}, virtual=True)


def net(seed=0):
    torch.manual_seed(seed)
    layers = [
        Layer(torch.randn(4, 4).double(), torch.randn(4).double(), torch.tensor(n), act)
        for n, act in enumerate(("tanh", "sin"))
    ]  # fmt: skip
    return Net(layers, torch.tensor(0.5, dtype=torch.float64))


def loss(net, x):
    for layer in net.layers:
        x = getattr(torch, layer.act)(x @ layer.w + layer.b * (layer.steps + 1)) * net.scale
    return x.square().sum()


def whole(value):
    return optree.tree_map(
        lambda x: x.full() if isinstance(x, ta.MeshTensor) else x, value,
        is_leaf=lambda x: isinstance(x, ta.MeshTensor), none_is_leaf=True, namespace=tree.NAMESPACE,
    )  # fmt: skip


X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
STACKS = {
    "plain": lambda f: f,
    "shard": lambda f: ta.shard(f, MESH),
    "checkpoint": ta.checkpoint,
    "jit": lambda f: ta.jit(f, backend="eager"),
    "shard of checkpoint": lambda f: ta.shard(ta.checkpoint(f), MESH),
}


@pytest.mark.parametrize("stack", STACKS)
def test_dataclasses_go_through_transforms_and_gradients(stack):
    """Integer leaves beside floating ones: gradients are taken of the floating part."""
    trained, rest = tree.partition(net())
    want = torch.func.grad(lambda t: loss(tree.combine(t, rest), X))(trained)
    for run in (
        torch.func.grad(lambda t: STACKS[stack](loss)(tree.combine(t, rest), X)),
        STACKS[stack](torch.func.grad(lambda t: loss(tree.combine(t, rest), X))),
        STACKS[stack](lambda t: torch.func.grad(lambda t: loss(tree.combine(t, rest), X))(t)),
    ):
        have = whole(run(trained))
        assert isinstance(have, Net) and isinstance(have.layers[0], Layer)
        assert tree.structure(have) == tree.structure(trained)
        for mine, theirs in zip(tree.leaves(have), tree.leaves(want), strict=True):
            torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(STACKS[stack](loss)(net(), X), loss(net(), X))


def test_static_fields_are_structure_and_paths_are_attributes():
    one = net()
    assert tree.paths(one, "net")[:3] == ["net.layers[0].w", "net.layers[0].b", "net.layers[0].steps"]
    other = tree.map(lambda x: x, one)
    assert other == one or tree.structure(other) == tree.structure(one)
    other.layers[0].act = "sin"
    assert tree.structure(other) != tree.structure(one)
    assert "args[0].layers[1].w" in [leaf.path for leaf in ta.trace(loss)(one, X).inputs]
    specs = Net([Layer(ta.P("a"), ta.P(), ta.P(), "tanh"), Layer(ta.P(), ta.P(), ta.P(), "sin")], ta.P())
    assert ta.place(one, MESH, specs).layers[0].w.spec == ta.P("a", None)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_dataclass_that_is_no_node_says_how_it_becomes_one(frozen):
    kind = dataclasses.make_dataclass("Bare", ["w"], frozen=frozen)
    with pytest.raises(ta.StaticArgumentError, match=r"args\[0\]\['p'\] is a Bare.*register_dataclass"):
        ta.shard(lambda p: p["p"].w * 2, MESH)({"p": kind(X)})


def test_a_frozen_dataclass_of_settings_stays_static():
    kind = dataclasses.make_dataclass("Settings", ["n"], frozen=True)
    assert torch.equal(ta.shard(lambda s, x: x * s.n, MESH)(kind(3), X), X * 3)


def test_what_is_no_dataclass_is_not_registered():
    with pytest.raises(TypeError, match="Pair is not a dataclass"):
        tree.register_dataclass(Pair)


# -- parts ------------------------------------------------------------------------------------------

LEAVES = [torch.ones(2), torch.ones(2, dtype=torch.complex64), torch.tensor(3), None, 2.5, "text"]


@pytest.mark.parametrize(
    "choose", [None, lambda x: x is None, lambda x: True, lambda x: isinstance(x, float)]
)
def test_parts_put_together_are_the_tree(choose):
    for a, b, c in itertools.product(LEAVES, repeat=3):
        whole = {"a": a, "rest": [b, (c, {})]}
        parts = tree.partition(whole, choose) if choose else tree.partition(whole)
        chosen = choose or (lambda x: isinstance(x, torch.Tensor) and x.dtype != torch.int64)
        for mine, theirs in zip(parts, (True, False), strict=True):
            want = [x for x in tree.leaves(whole) if bool(chosen(x)) is theirs]
            assert all(x is y for x, y in zip(tree.leaves(mine), want, strict=True))
        for pair in (parts, parts[::-1]):
            together = tree.combine(*pair)
            assert tree.structure(together) == tree.structure(whole)
            assert all(x is y for x, y in zip(tree.leaves(together), tree.leaves(whole), strict=True))


def test_parts_of_different_trees_do_not_go_together():
    with pytest.raises(ValueError, match=r"[Kk]ey"):
        tree.combine({"a": 1}, {"b": 1})


def test_an_optimiser_steps_the_part_that_is_trained():
    trained, rest = tree.partition(net())
    optimizer = ta.optim.adamw(0.1)
    grads = torch.func.grad(lambda t: loss(tree.combine(t, rest), X))(trained)
    new, _ = optimizer.update(grads, optimizer.init(trained), trained)
    assert tree.combine(new, rest).layers[1].steps is rest.layers[1].steps
    assert not torch.equal(new.scale, trained.scale)


def test_the_public_modules_can_be_imported_from():
    from torchard.optim import adamw
    from torchard.tree import register

    assert adamw is ta.optim.adamw and register is tree.register
