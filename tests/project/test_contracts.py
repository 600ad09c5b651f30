"""Contracts are declared: what a class of one has is never asked of an object by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from torchard.functional.core.placed import Placed
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.remat.recompute import Recompute
from torchard.kernels.fuse import Fuse
from torchard.sharding.lowering.runtime import Distributed, Simulated
from torchard.sharding.shard import Shard
from torchard.transforms import (
    Compiler,
    Hint,
    Placement,
    Record,
    Rewrite,
    Runtime,
    ValueRewrite,
)

CONTRACTS = (Compiler, Hint, Placed, Placement, Record, Rewrite, Runtime, ValueRewrite, Wrapper)
# The one place where an object of any class is asked whether it is placed.
ASKED_ONCE = {("core/placed.py", "__torchard_placed__")}


def _declared() -> set[str]:
    names = {name for kind in CONTRACTS for name in {**vars(kind), **inspect.get_annotations(kind)}}
    ours = {name for name in names if name.startswith("__torchard")}
    return ours | {name for name in names if not name.startswith("_")}


def _probes(path: Path) -> Iterator[str]:
    """The names that a file asks of objects by getattr with a default, or by hasattr."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            count = {"getattr": 3, "hasattr": 2}.get(node.func.id)
            name = node.args[1] if len(node.args) == count else None
            if isinstance(name, ast.Constant):
                yield str(name.value)


@pytest.mark.parametrize("room", ["functional", "sharding", "kernels"])
def test_no_contract_is_probed(room: str) -> None:
    declared = _declared()
    assert {"stage", "passes", "guard", "bytes_of", "rewrites", "donate_argnums"} <= declared
    found = [
        (str(path.relative_to(ROOT / room)), name)
        for path in (ROOT / room).rglob("*.py")
        for name in _probes(path)
        if name in declared
    ]
    assert set(found) <= ASKED_ONCE


LIBRARY = (Shard, Fuse, Recompute, Simulated, Distributed)


@pytest.mark.parametrize("kind", LIBRARY, ids=lambda kind: kind.__name__)
def test_what_the_library_has_of_a_contract_says_so(kind: type) -> None:
    assert issubclass(kind, (Rewrite, Runtime))
