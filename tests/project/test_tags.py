"""Tags: every key of ``node.meta`` is declared, by one constant, and what its declaration says is so."""

from __future__ import annotations

import importlib

import pytest
import tag_uses
import torch
from torch import fx

from torchard.functional.programs.tagging import TAGS, TORCH, TagError, declare, inherit, stand_for
from torchard.functional.programs.tags import NAME, PHASE, SCOPE, VAL

# One that is read by more files than this is read by "many".
FEW = 6
# What a node hands on to what has this in common with it.
HANDED_ON = {
    "call": {"call", "value", "place"},
    "value": {"value", "place"},
    "place": {"place"},
}


@pytest.fixture(autouse=True, scope="module")
def every_tag() -> None:
    """All declarations are loaded; not at import, since to find them is to parse all sources."""
    for path in {constants[0].split()[0] for constants in tag_uses.declared().values()}:
        importlib.import_module("torchard." + path.removesuffix(".py").replace("/", "."))


def test_one_file_touches_what_is_noted_on_nodes() -> None:
    assert not tag_uses.touches(), f"{tag_uses.MECHANISM} does; declare a tag, and go through it"


def test_each_tag_is_declared_once_by_its_name() -> None:
    constants = tag_uses.declared()
    assert {name: [c.split()[1] for c in found] for name, found in constants.items()} == {
        name: [name.upper()] for name in constants
    }
    ours = {name for name, tag in TAGS.items() if "/tags.py:" in tag.where}
    reserved = {name for name in ours if TAGS[name].read_by == TORCH}
    assert ours - reserved == set(constants)


def test_who_writes_and_reads_them_is_as_declared() -> None:
    uses = tag_uses.uses()
    for name in tag_uses.declared():
        tag, constant = TAGS[name], name.upper()
        if tag.written_by != TORCH:
            _same(name, "written_by", tag.written_by, uses.writers[constant])
        _same(name, "read_by", tag.read_by, uses.readers[constant])


def _same(name: str, what: str, declared: str, found: set[str]) -> None:
    assert found, f"nobody is found that the tag {name!r} is {what}: take it away"
    said = "many" if len(found) > FEW else ", ".join(sorted(found))
    assert declared == said, f"of the tag {name!r}, {what} should be {said!r}"


def test_a_key_is_one_tag() -> None:
    with pytest.raises(TagError, match=r"'scope' is declared already, at programs/tags\.py:\d+:"):
        declare("scope", "something else")
    with pytest.raises(TagError, match="'stack_trace' is declared already"):  # torch's own
        declare("stack_trace", "something else")
    with pytest.raises(ValueError, match="follows must be"):
        declare("mine", "something", follows="everything")  # type: ignore[arg-type]


def test_a_tag_that_is_missing_is_named_with_its_node() -> None:
    node = fx.Graph().call_function(torch.sin, ())
    PHASE.set(node, "forward")
    with pytest.raises(TagError) as error:
        VAL.of(node)
    assert str(error.value).startswith("sin (<built-in method sin")
    assert "has no tag 'val': fake tensor" in str(error.value)
    assert str(error.value).endswith("written by torch; the node has 'phase'.")
    assert VAL.get(node) is None and VAL.get(node, 1) == 1 and not VAL.on(node)


@pytest.mark.parametrize("same", HANDED_ON)
def test_what_is_handed_on_is_what_follows(same: str) -> None:
    graph = fx.Graph()
    old, new = (graph.call_function(torch.sin, ()) for _ in range(2))
    for number, tag in enumerate(TAGS.values()):
        tag.set(old, number)
    NAME.set(new, "what it had is forgotten")
    inherit(new, old, same)  # type: ignore[arg-type]
    for tag in TAGS.values():
        assert tag.get(new) == (tag.get(old) if tag.follows in HANDED_ON[same] else None), tag


def test_what_stands_for_a_node_keeps_its_own_place() -> None:
    graph = fx.Graph()
    old, new = (graph.call_function(torch.sin, ()) for _ in range(2))
    for tag in (NAME, SCOPE):
        tag.set(old, "old")
    stand_for(new, old)
    assert NAME.of(new) == "old" and not SCOPE.on(new)
    NAME.set(new, "its own")
    stand_for(new, old)
    assert NAME.of(new) == "its own"
