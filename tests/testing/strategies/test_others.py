"""Trees, keys, meshes, specs, policies and stacks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from same_bits import assert_same_memory

from torchard import policies, testing
from torchard.functional import random
from torchard.functional.core import tree
from torchard.functional.trace import name
from torchard.sharding import Mesh, P, place
from torchard.testing import check_checkpoint, check_stack
from torchard.testing import strategies as ts

MANY = settings(max_examples=5000, database=None)


@given(ts.pytrees(st.integers() | st.none()))
def test_trees_are_of_the_librarys_kinds(value: object) -> None:
    leaves, structure = tree.flatten(value)
    assert all(leaf is None or isinstance(leaf, int) for leaf in leaves)
    assert tree.unflatten(structure, leaves) == value


def test_the_smallest_nested_tree() -> None:
    def nested(value: object) -> bool:
        return isinstance(value, list) and any(isinstance(child, dict) and child for child in value)

    assert find(ts.pytrees(st.integers()), nested, settings=MANY) == [{"a": 0}]
    assert find(ts.pytrees(st.integers()), lambda value: True) == 0


@given(ts.keys())
def test_keys_are_keys(key: torch.Tensor) -> None:
    assert random.bits(key, (2,)).shape == (2,)


@given(st.data())
def test_specs_fit_their_values(data: st.DataObject) -> None:
    mesh = data.draw(ts.meshes())
    values = dict(zip("wxy", data.draw(ts.tensors("b d, d, b 3 ...")), strict=True))
    specs = data.draw(ts.specs_for(values, mesh, fused=data.draw(st.booleans())))
    for key, value in place(values, mesh, specs).items():
        assert torch.equal(value.full(), values[key])


def test_shapes_stand_for_values() -> None:
    mesh = Mesh({"dp": 2}, virtual=True)
    shapes = {"w": (4, 5), "b": torch.Size([5]), "scalar": (), "steps": 3}
    want = {"w": P(None, "dp"), "b": P(), "scalar": P(), "steps": P()}
    found = find(ts.specs_for(shapes, mesh), lambda s: s["w"] == want["w"], settings=MANY)
    assert found == want


@pytest.mark.parametrize("fused", [False, True])
def test_specs_shrink_to_replication(fused: bool) -> None:
    mesh = Mesh({"dp": 2, "tp": 3}, virtual=True)
    found = find(ts.specs_for([(4, 4), (4,)], mesh, fused=fused), lambda specs: True)
    assert found == [P(), P()]


@pytest.mark.parametrize("sizes", [(5, 2), (2, 3)], ids=["uneven", "too large for the dim"])
def test_the_smallest_mesh(sizes: tuple[int, int]) -> None:
    dim, ranks = sizes

    @st.composite
    def placements(draw: st.DrawFn) -> tuple[Mesh, P]:
        mesh = draw(ts.meshes())
        return mesh, draw(ts.specs_for((dim,), mesh))

    def splits(drawn: tuple[Mesh, P]) -> bool:
        mesh, spec = drawn
        return bool(place(torch.ones(dim), mesh, spec).layout.axes) and mesh.size >= ranks

    mesh, spec = find(placements(), splits, settings=MANY)
    assert (mesh, spec) == (Mesh({"dp": ranks}, virtual=True), P("dp"))


PLACED = Mesh({"dp": 2, "tp": 2}, virtual=True)
# What the text of a failing example may name.
PUBLIC = {
    **{name: getattr(policies, name) for name in policies.__all__},
    **{"torch": torch, "Mesh": Mesh, "P": P, "key": random.key},
}


def test_the_arguments_of_a_failing_example_can_be_pasted() -> None:
    fails_on: list[dict[str, Any]] = []

    @settings(
        database=None, derandomize=True, max_examples=500, phases=[Phase.generate, Phase.shrink]
    )
    @given(
        mesh=ts.meshes(),
        key=ts.keys(),
        xs=ts.tensors("n m, m", values="all"),
        specs=ts.specs_for({"w": (4, 6), "b": (6,)}, PLACED, fused=True),
        policy=ts.policies(["a"]),
        word=ts.stacks(),
        tree=ts.pytrees(ts.tensors("d").map(lambda drawn: drawn[0])),
    )
    def fails(**drawn: Any) -> None:
        if "factors" in repr(drawn["specs"]) and not drawn["xs"][0].isfinite().all():
            fails_on.append(drawn)
            raise AssertionError("found")

    with pytest.raises(AssertionError, match="found") as failure:
        fails()
    text = "".join(failure.value.__notes__)
    call = text[text.index("fails(") :].split("\n)")[0] + "\n)"
    pasted = eval(call, {**PUBLIC, "fails": dict})
    assert "mesh=Mesh({'dp': 2}, virtual=True)" in call and "key=key(0)" in call
    assert "P.factors(" in call and "policy=save_nothing" in call and "word=('shard',)" in call
    assert repr(pasted) == repr(fails_on[-1])
    for have, want in zip(pasted["xs"], fails_on[-1]["xs"], strict=True):
        assert_same_memory(have, want)


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return name(torch.tanh(x @ w), "hidden").sin() @ w.mT


W, X = torch.arange(6.0).view(3, 2) / 4, torch.arange(12.0).view(4, 3) / 8


@settings(max_examples=examples(ci=2, explore=100))
@given(ts.policies(names=["hidden"]))
def test_policies_change_no_value(policy: object) -> None:
    check_checkpoint(f, [policy], W, X)


def test_the_smallest_policy() -> None:
    assert str(find(ts.policies(), lambda policy: True)) == "save_nothing"
    named = find(ts.policies(["a", "b"]), lambda policy: "offload" in str(policy), settings=MANY)
    assert str(named) == "offload_names('a')"


@settings(max_examples=examples(ci=4, explore=300))
@given(ts.stacks(["shard", "checkpoint", "grad", "jit", "vmap"], max_size=3, max_derivatives=1))
def test_stacks_are_words_of_check_stack(word: tuple[str, ...]) -> None:
    check_stack(f, [word], W, X)


def test_a_layer_that_check_stack_does_not_know_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"stacks: 'shrad' is not a layer .*; layers are .* shard"):
        ts.stacks(["grad", "shrad"])


def test_the_smallest_stacks() -> None:
    assert find(ts.stacks(), lambda word: True) == ("shard",)
    both = find(ts.stacks(), lambda word: {"grad", "checkpoint"} <= set(word), settings=MANY)
    assert sorted(both) == ["checkpoint", "grad"]


@given(ts.stacks(max_derivatives=1))
def test_stacks_differentiate_as_often_as_asked(word: tuple[str, ...]) -> None:
    assert 1 <= len(word) <= 4 and sum(layer in ("grad", "jvp") for layer in word) <= 1


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import torch, torchard.testing
torchard.testing.equal(torch.sin, torch.sin, torch.ones(2))
from torchard import *
from torchard.testing import *
equal(torch.sin, torch.sin, torch.ones(2), orders=["value"])
assert policies.save_dots
for name in ("tensors", "programs"):
    try:
        getattr(torchard.testing, name)
    except ModuleNotFoundError as error:
        assert "pip install 'torchard[hypothesis]'" in str(error) and error.name == "hypothesis", error
    else:
        raise AssertionError(name)
"""


def test_laws_need_no_hypothesis() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_HYPOTHESIS], check=True)


def test_strategies_are_names_of_the_testing_module() -> None:
    assert {*ts.__all__, *testing.__all__} <= set(dir(testing))
    for word in ts.__all__:
        assert getattr(testing, word) is getattr(ts, word)
    with pytest.raises(AttributeError, match="has no attribute 'strategy'"):
        testing.strategy  # noqa: B018
