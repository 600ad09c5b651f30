"""Tags: typed metadata of the nodes of a graph, and the rules by which new nodes inherit it.

Passes and packages exchange information about values as tags on the graph. Every key of ``fx.Node.meta``
is declared once, in tags.py, or in the ``tags.py`` of the only package that uses it, and is read and
written through its declaration; a user's transform declares its own. No other file uses ``node.meta``.
What a pass tells others about a whole program is a tag of its output node (``Program.output``).

Operations are replayed in another trace, values copied, nodes replaced. Each declaration says which of
the new nodes inherit the tag, and :func:`inherit` copies it to them:

=========== ======================================================================================
``follows`` the new nodes that inherit the tag
=========== ======================================================================================
``node``    none: it belongs to this node in this graph
``call``    the same operation: replayed in a trace, recomputed, planned for a mesh
``value``   that, and other nodes with the same value, such as an offloaded copy
``place``   that, and any operation that replaces the node, or is inserted because of it
=========== ======================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

from torch import fx

from torchard.functional.core.arguments import checked

__all__ = [
    "TAGS",
    "TORCH",
    "Follows",
    "Same",
    "Tag",
    "TagError",
    "Tags",
    "declare",
    "forget",
    "inherit",
    "inherited_tags",
    "own_tags",
    "put",
    "stand_for",
    "strip",
]

T = TypeVar("T")
D = TypeVar("D")
Follows = Literal["node", "call", "value", "place"]
Same = Literal["call", "value", "place"]
Tags = Mapping["Tag[Any]", Any]


class TagError(LookupError):
    """A node lacks a tag that is asked of it, or a tag is declared twice.

    >>> import torch
    >>> from torchard.transforms import TAGS, TagError
    >>> node = torch.fx.Graph().placeholder("x")
    >>> try:
    ...     TAGS["scope"].of(node)
    ... except TagError as error:
    ...     print(error)
    x (x) has no tag 'scope': "block/3", the enclosing torchard.scope. It is written by ...
    """


@dataclass(frozen=True, eq=False, repr=False)
class Tag(Generic[T]):
    """One key of ``fx.Node.meta``, and how its values are read and written; created by `declare`.

    Attributes:
        name: the key.
        meaning: the meaning of the value for the node.
        written_by, read_by: the files, or other code, that write and read the tag.
        follows: which nodes made from a node have the tag too (see above).
        where: the line that declared it.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import TAGS, Tag
    >>> source: Tag[str] = TAGS["source"]
    >>> node = ta.trace(torch.sin)(torch.ones(3)).calls[0]
    >>> source.on(node), source.follows
    (True, 'place')
    """

    name: str
    meaning: str
    written_by: str
    read_by: str
    follows: Follows
    where: str

    def __repr__(self) -> str:
        return f"tag {self.name!r}"

    def of(self, node: fx.Node) -> T:
        """The value on a node that has the tag.

        Raises:
            TagError: the node does not have it.
        """
        try:
            value: T = node.meta[self.name]
        except KeyError:
            raise TagError(self._missing(node)) from None
        return value

    @overload
    def get(self, node: fx.Node) -> T | None: ...
    @overload
    def get(self, node: fx.Node, default: D) -> T | D: ...
    def get(self, node: fx.Node, default: Any = None) -> Any:
        """The value on a node, or the default."""
        return node.meta.get(self.name, default)

    def on(self, node: fx.Node) -> bool:
        """Whether a node has the tag, whatever its value."""
        return self.name in node.meta

    def set(self, node: fx.Node, value: T) -> None:
        """Set the tag of a node."""
        node.meta[self.name] = value

    def setdefault(self, node: fx.Node, value: T) -> None:
        """Set the tag of a node that does not have it."""
        node.meta.setdefault(self.name, value)

    def _missing(self, node: fx.Node) -> str:
        return (
            f"{node.name} ({node.target}) has no tag {self.name!r}: {self.meaning}. It is written by "
            f"{self.written_by or 'the transform that declared it, at ' + self.where}; the node has "
            f"{', '.join(map(repr, node.meta)) or 'no tags'}."
        )


TAGS: dict[str, Tag[Any]] = {}
"""Every tag, by its name.

>>> from torchard.transforms import TAGS
>>> TAGS["scope"].meaning, TAGS["scope"].follows
('"block/3", the enclosing torchard.scope', 'place')
"""
TORCH = "torch"
_FOLLOWED: dict[Same, tuple[Follows, ...]] = {
    "call": ("call", "value", "place"),
    "value": ("value", "place"),
    "place": ("place",),
}
# The names of the tags that a node inherits from one with the same call, value or place.
_SHARED: dict[Same, list[str]] = {same: [] for same in _FOLLOWED}


@checked
def declare(
    name: str,
    meaning: str,
    *,
    written_by: str = "",
    read_by: str = "",
    follows: Literal["node", "call", "value", "place"] = "node",
) -> Tag[Any]:
    """A new tag, whose value a transform writes on a program's nodes, for itself or for others.

    Args:
        name: its key in ``fx.Node.meta``.
        meaning: the meaning of its value for a node.
        written_by, read_by: its writers and readers, for the table of all tags (`TAGS`).
        follows: which nodes made from a node have the tag too: none (``"node"``); the same operation,
            made again (``"call"``); that, and other nodes with its value (``"value"``); these, and
            whatever takes its place (``"place"``): its gradient, a collective that it needs, the
            operations that ranks run for it.

    Returns:
        The tag, to be kept in a constant.

    Raises:
        TagError: the name is declared already.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Tag, declare
    >>> COST: Tag[int] = declare("doc_cost", "FLOPs of the operation", follows="call")
    >>> node = ta.trace(torch.sin)(torch.ones(3)).calls[0]
    >>> COST.set(node, 3)
    >>> COST.of(node)
    3
    """
    known = TAGS.get(name)
    if known is not None:
        raise TagError(
            f"the tag {name!r} is declared already, at {known.where}: {known.meaning}. Use another name."
        )
    tag: Tag[Any] = Tag(name, meaning, written_by, read_by, follows, _caller())
    TAGS[name] = tag
    for same, followed in _FOLLOWED.items():
        if follows in followed:
            _SHARED[same].append(name)
    return tag


def _caller() -> str:
    """The innermost line outside of this file and of the checks of arguments."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename in (__file__, checked.__code__.co_filename):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"


def inherited_tags(node: fx.Node, same: Same = "place") -> dict[Tag[Any], Any]:
    """The tags that a node passes on to another node in its place (or with its value, or its call).

    Args:
        node: the node.
        same: what both nodes have in common, as in `inherit`.

    Returns:
        The value of each tag that is passed on.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import inherited_tags
    >>> node = ta.trace(ta.scope("act")(torch.sin))(torch.ones(3)).calls[0]
    >>> {tag.name: value for tag, value in inherited_tags(node).items()}["scope"]
    'act'
    """
    meta = node.meta
    return {TAGS[name]: meta[name] for name in _SHARED[same] if name in meta}


def inherit(node: fx.Node, like: fx.Node, same: Same = "place") -> None:
    """Replace the tags of a new node by those that another node passes on.

    Args:
        node: the new node.
        like: the node whose tags it inherits.
        same: what both nodes have in common: the new node replaces ``like`` or exists because of it
            (``"place"``), holds the same value (``"value"``), or is the same operation (``"call"``).

    >>> import torch, torchard as ta
    >>> from torchard.transforms import inherit
    >>> program = ta.trace(ta.scope("act")(torch.sin))(torch.ones(3))
    >>> (old,) = program.calls
    >>> with program.graph.inserting_after(old):
    ...     new = program.graph.call_function(torch.ops.aten.neg.default, (old,))
    >>> inherit(new, old)
    >>> new.meta["scope"]
    'act'
    """
    meta = like.meta
    inherited = {name: meta[name] for name in _SHARED[same] if name in meta}
    node.meta.clear()  # assigning to an attribute of a node takes longer
    node.meta.update(inherited)


def stand_for(node: fx.Node, old: fx.Node) -> None:
    """Copy the tags of a value from a node to the one that replaces it.

    So a label is not lost with its node. Tags that the new node has already are kept.
    """
    for name in _SHARED["value"]:
        if TAGS[name].follows == "value" and name in old.meta:
            node.meta.setdefault(name, old.meta[name])


def own_tags(node: fx.Node) -> dict[Tag[Any], Any]:
    """All tags of a node but torch's."""
    meta = node.meta
    ours = ((name, TAGS.get(name)) for name in meta)
    return {tag: meta[name] for name, tag in ours if tag is not None and tag.written_by != TORCH}


def put(node: fx.Node, tags: Tags) -> None:
    """Set several tags of a node."""
    for tag, value in tags.items():
        node.meta[tag.name] = value


def forget(node: fx.Node, *tags: Tag[Any]) -> None:
    """Remove several tags of a node, if it has them."""
    for tag in tags:
        node.meta.pop(tag.name, None)


def strip(graph: fx.Graph) -> None:
    """Remove all tags except torch's: compilers give some of our names another meaning."""
    ours = [name for name, tag in TAGS.items() if tag.written_by != TORCH]
    for node in graph.nodes:
        for name in ours:
            node.meta.pop(name, None)
