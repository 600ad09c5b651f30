"""The import graph: no cycle between modules or folders, and no import against the rooms' one way.

Imports inside of functions and those for type checkers alone count as any others.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

# What each room may import besides itself.
BELOW = {"functional": set(), "sharding": {"functional"}, "kernels": {"functional"}}
# Imported by those who want them: public modules, and kernels that need Triton.
ON_DEMAND = ("torchard.kernels.triton", "torchard.sharding.testing", "torchard.sharding.transports")
Graph = dict[str, set[str]]


def _modules() -> dict[str, Path]:
    found = {}
    for room in BELOW:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("torchard", *(p for p in parts if p != "__init__")))] = path
    return found


MODULES = _modules()


def _imported(path: Path) -> Iterator[str]:
    """The names that a file imports, those of attributes of modules in full."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


@functools.cache
def _module_graph() -> Graph:
    return {
        name: {m for m in _imported(path) if m in MODULES and m != name}
        for name, path in MODULES.items()
    }


def _folder(module: str) -> str:
    """The folder of a module; of one that is a package, that package."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def _folder_graph() -> Graph:
    graph: Graph = {}
    for module, imported in _module_graph().items():
        mine = graph.setdefault(_folder(module), set())
        mine |= {_folder(other) for other in imported} - {_folder(module)}
    return graph


@pytest.mark.parametrize("made", [_module_graph, _folder_graph], ids=["modules", "folders"])
def test_there_is_no_cycle(made: Callable[[], Graph]) -> None:
    graph = made()
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
    assert set(order) >= set(graph)


def test_importing_the_library_loads_every_module() -> None:
    """What nothing imports registers nothing: rules and decompositions are entered by imports."""
    graph = _module_graph()
    entries = [m for path in (ROOT / "src" / "torchard").glob("*.py") for m in _imported(path)]
    loaded: set[str] = set()
    waiting = [m for m in entries if m in MODULES]
    while waiting:
        module = waiting.pop()
        if module not in loaded:
            loaded.add(module)
            waiting += graph[module]
            waiting += [m for m in [module.rpartition(".")[0]] if m in MODULES]
    assert set(MODULES) - loaded == {m for m in MODULES if m.startswith(ON_DEMAND)}


def test_rooms_import_one_way() -> None:
    against = [
        (module, other)
        for module, imported in _module_graph().items()
        for other in imported
        if other.split(".")[1] not in BELOW[module.split(".")[1]] | {module.split(".")[1]}
    ]
    assert not against


def test_a_folder_says_what_it_is_for_and_holds_few_files() -> None:
    for folder in sorted({path.parent for path in MODULES.values()}):
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
        assert len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) <= 15, folder
