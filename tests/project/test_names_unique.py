"""A public class has a name of its own: no other class has it, nor an alias of types elsewhere."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

ROOMS = ("functional", "sharding", "kernels")


def _names(path: Path) -> Iterator[tuple[str, str]]:
    """The public classes of a module, and its aliases of types: whether "class" or "alias"."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, "class"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name, "alias"


def test_no_class_shares_its_name() -> None:
    where: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        for name, kind in _names(path):
            where[name].append((kind, str(path.relative_to(ROOT))))
    shared = {
        name: places
        for name, places in where.items()
        if len(places) > 1 and any(kind == "class" for kind, _ in places)
    }
    assert not shared, "\n".join(f"{name}: {places}" for name, places in shared.items())
