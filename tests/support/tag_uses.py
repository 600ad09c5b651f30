"""Who writes and who reads each tag, and who touches ``node.meta``: read off the source of the rooms."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from paths import ROOT

ROOMS = ("functional", "sharding", "kernels")
# The one file that touches node.meta, and the name under which declarations stand.
MECHANISM, DECLARATIONS = "functional/programs/tagging.py", "tags.py"
_WRITES = {"set", "setdefault"}


@dataclass
class Uses:
    """By constant: the files that write the tag, and those that read it."""

    writers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


@functools.cache
def files() -> list[tuple[str, ast.Module]]:
    """Each file of the rooms, by its path, parsed."""
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
    ]


@functools.cache
def declared() -> dict[str, list[str]]:
    """By name of a tag, the constants that it is kept in, with their files: of each there is one."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and _declares(node.value):
                assert isinstance(node.value, ast.Call) and isinstance(node.target, ast.Name)
                found[ast.literal_eval(node.value.args[0])].append(f"{path} {node.target.id}")
    return found


def _declares(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == "declare"


def uses() -> Uses:
    """Of each constant that a tags.py declares."""
    found = Uses()
    for path, tree in files():
        if Path(path).name != DECLARATIONS:
            _used_in(path.partition("/")[2].removesuffix(".py"), tree, found)
    return found


def _used_in(where: str, tree: ast.Module, found: Uses) -> None:
    meant = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith(".tags")
        for alias in node.names
    }
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in meant:
            kind = _kind(node, parents)
            if kind == "write":
                found.writers[meant[node.id]].add(where)
            elif kind == "read":
                found.readers[meant[node.id]].add(where)


def _kind(node: ast.Name, parents: dict[ast.AST, ast.AST]) -> str:
    """A method says it; else it is written where it is a key, and read in any other place."""
    parent = parents[node]
    if isinstance(parent, ast.Attribute):
        return "write" if parent.attr in _WRITES else "read"
    if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") == "forget":
        return "neither"
    if isinstance(parent, ast.Dict) and node in parent.keys:
        return "write"
    stored = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
    return "write" if stored and parent.slice is node else "read"  # type: ignore[attr-defined]


def touches() -> list[str]:
    """Where a file other than the mechanism's touches an attribute ``meta``."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "meta" and path != MECHANISM
    ]
