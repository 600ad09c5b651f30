"""Every public name says what it is for, what it takes, gives and raises, and shows a call.

The examples themselves are run where they stand: conftest.py collects them from src/.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docstrings import DocstringDocument, docstrings

import torchard
import torchard.testing
import torchard.testing.strategies
from torchard import kernels
from torchard.sharding import testing

SOURCES = Path(torchard.__file__).resolve().parent
MODULES = (
    *(torchard, torchard.machines, torchard.nn, torchard.optim, torchard.random, torchard.policies),
    torchard.tree,
    *(torchard.transforms, kernels, testing, torchard.testing, torchard.testing.strategies),
)


@dataclass(frozen=True)
class Public:
    """One public name, and the module that it is public in."""

    module: types.ModuleType
    name: str

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    @property
    def value(self) -> Any:
        return getattr(self.module, self.name)

    @property
    def doc(self) -> str:
        """Its docstring; of a constant, the string behind the assignment."""
        if inspect.ismodule(self.value) or _has_source(self.value):
            return inspect.getdoc(self.value) or ""
        found = [d for module in _defining(self.module) if (d := _constants(module).get(self.name))]
        return inspect.cleandoc(found[0]) if found else ""

    def sections(self) -> dict[str, str]:
        """The text below each heading; of a class, what it inherits as well."""
        kind = self.value
        bases = kind.__mro__[1:-1] if inspect.isclass(kind) else ()
        docs = [inspect.cleandoc(b.__doc__) for b in reversed(bases) if b.__doc__ and _ours(b)]
        found: dict[str, str] = {}
        for doc in (*docs, self.doc):
            for heading, text in _SECTION.findall(doc):
                found[heading] = found.get(heading, "") + text
        return found


_SECTION = re.compile(r"^(\w+)(?: \([^)]*\))?:\n((?:(?: .*)?\n?)+)", re.MULTILINE)
_NAMES = re.compile(r"^    (\**\w+(?:, \**\w+)*):", re.MULTILINE)


def _has_source(value: Any) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value)


def _ours(kind: type) -> bool:
    return kind.__module__.startswith("torchard")


def _defining(module: types.ModuleType) -> list[str]:
    """The module, and the one that it only gives another name to."""
    behind = [v.__module__ for n in module.__all__ if _has_source(v := getattr(module, n))]
    return [module.__name__, *dict.fromkeys(behind)]


@cache
def _constants(module: str) -> dict[str, str]:
    path = SOURCES.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return {name: constant.value for name, constant in docstrings(path.read_text()).items()}


def _everything() -> list[Public]:
    found = [Public(module, name) for module in MODULES for name in module.__all__]
    same = {id(p.value) if _has_source(p.value) else str(p): p for p in reversed(found)}
    return list(same.values())


EVERYTHING = sorted(_everything(), key=str)


def _each(fits: Callable[[Public], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("public", list(filter(fits, EVERYTHING)), ids=str)


def _is_function(public: Public) -> bool:
    return inspect.isfunction(public.value)


def _has_parameters(public: Public) -> bool:
    """Exceptions that are made as Python's own are, enums and functions without parameters have none."""
    kind = public.value
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return False
    if inspect.isclass(kind) and issubclass(kind, Exception):
        return "__init__" in vars(kind)
    return _has_source(kind) and bool(inspect.signature(kind).parameters)


def _raises(public: Public) -> bool:
    """Whether there is a ``raise`` in the function's own body."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(public.value)))
    except OSError:  # what hypothesis makes of a function
        return False
    nodes = list(ast.parse(source).body[0].body)
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return any(isinstance(node, ast.Raise) for node in nodes)


def _returns(public: Public) -> bool:
    return inspect.signature(public.value).return_annotation not in (None, "None")


@_each(lambda public: True)
def test_has_a_purpose_and_an_example(public: Public) -> None:
    purpose, _, example = public.doc.partition(">>>")
    assert len(purpose.split()) > 2, f"{public} has no docstring"
    assert example, f"{public} shows no call"
    assert re.search(rf"\b{public.name}\b", example), f"the example of {public} is of something else"


@_each(_has_parameters)
def test_says_what_it_takes(public: Public) -> None:
    sections = public.sections()
    text = sections.get("Args", "") + sections.get("Attributes", "")
    told = {n.strip(" `*") for names in _NAMES.findall(text) for n in names.split(",")}
    missing = set(inspect.signature(public.value).parameters) - told - {"args", "kwargs"}
    assert not missing, f"{public} does not say what {sorted(missing)} are"


@_each(lambda public: _is_function(public) and _returns(public))
def test_says_what_it_returns(public: Public) -> None:
    assert {"Returns", "Yields"} & public.sections().keys(), f"{public} does not say what it returns"


@_each(lambda public: _is_function(public) and _raises(public))
def test_says_what_it_raises(public: Public) -> None:
    assert "Raises" in public.sections(), f"{public} does not say what it raises"


def test_all_examples_are_collected(collected: list[str]) -> None:
    """What a name's docstring is, is among what Sybil finds in the sources."""
    lost = [str(p) for p in EVERYTHING if ">>>" in p.doc and p.doc not in collected]
    assert not lost


@pytest.fixture
def collected() -> list[str]:
    documents = [DocstringDocument.parse(str(path)) for path in _python_files()]
    return [inspect.cleandoc(e.parsed.docstring) for document in documents for e in document]


def _python_files() -> list[Path]:
    folders = (SOURCES, *(SOURCES / room for room in ("functional", "sharding", "kernels")))
    return [path for folder in folders for path in folder.rglob("*.py")]
