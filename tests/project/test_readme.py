"""README.md and docs show only what is there; their examples are run where they stand."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import torchard
import torchard.sharding.testing

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TEXT = "".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(?:python|\{code-cell\})\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
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
    return value if callable(value) else None


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
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_public_name_is_shown_as_code() -> None:
    shown = set(re.findall(r"[A-Za-z_]\w*", "\n".join([*BLOCKS, *SPANS])))
    errors = {n for n in torchard.__all__ if n.endswith(("Error", "Mismatch", "Warning"))}
    assert not set(torchard.__all__) - errors - {"__version__"} - shown


def test_the_example_prints_what_is_shown() -> None:
    """The code blocks are one file; what it prints is behind "prints"."""
    [(code, expected)] = re.findall(
        r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", README, re.DOTALL
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "mlp.py", "exec"), {"__name__": "mlp"})
    assert printed.getvalue() == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists() or (page.parent / f"{link}.md").exists(), link


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("ARCHITECTURE.md", 250)])
def test_what_is_read_first_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_the_map_is_of_what_is_there() -> None:
    """Files and folders that ARCHITECTURE.md names, from the root or from a room."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = ("", "functional", "sharding", "kernels")
    named = {span for span in re.findall(r"`([\w/]+(?:\.py|/))`", text) if "/" in span}
    missing = {n for n in named if not any((ROOT / room / n).exists() for room in rooms)}
    assert not missing
