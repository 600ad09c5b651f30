"""README shows only what is there. Its examples are run where they stand (conftest.py)."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

import torchard
import torchard.sharding.testing

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
SPANS = [span.replace(r"\|", "|") for span in re.findall(r"`([^`\n]+)`", PROSE)]


def _calls() -> Iterator[ast.Call]:
    """Calls written in the prose, so far as they are Python; those in blocks are run."""
    for span in SPANS:
        try:
            tree = ast.parse(span)
        except SyntaxError:  # a shell command, an arrow
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _public(call: ast.Call) -> Any:
    """What of the library is called, or None."""
    name = ast.unparse(call.func)
    value: Any = torchard
    for part in name.removeprefix("torchard.").split("."):
        if inspect.ismodule(value) and part not in value.__all__ and value is not torchard.sharding:
            return None
        value = getattr(value, part, None)
    return value


CALLS = [(ast.unparse(call), call) for call in _calls() if _public(call) is not None]


@pytest.mark.parametrize("call", [c for _, c in CALLS], ids=[text for text, _ in CALLS])
def test_calls_are_written_as_they_are_called(call: ast.Call) -> None:
    positional = [arg for arg in call.args if not _is_rest(arg)]
    keywords = {k.arg: None for k in call.keywords if k.arg and not _is_rest(k.value)}
    inspect.signature(_public(call)).bind_partial(*positional, **keywords)


def _is_rest(value: ast.expr) -> bool:
    return isinstance(value, ast.Starred) or (isinstance(value, ast.Constant) and value.value is ...)


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", TEXT)) - {"nothing"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_public_name_is_shown_as_code() -> None:
    shown = set(re.findall(r"[A-Za-z_]\w*", "\n".join([*BLOCKS, *SPANS])))
    errors = {n for n in torchard.__all__ if n.endswith(("Error", "Mismatch", "Warning"))}
    assert not set(torchard.__all__) - errors - {"__version__"} - shown
