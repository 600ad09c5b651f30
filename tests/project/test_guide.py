"""The guide, docs: its pages are run where they stand (conftest.py), the first one also as a file."""

from __future__ import annotations

import ast
import code
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType

import forked
import pages
import pytest
from paths import EXAMPLES, ROOT

import torchard
import torchard.sharding.testing
import torchard.sharding.transports
import torchard.testing
import torchard.testing.strategies

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_first_page_is_a_program(tmp_path: Path) -> None:
    """Its blocks, typed into a file in an empty folder, print what it shows."""
    cells = list(pages.cells((DOCS / "quickstart.md").read_text()))
    (tmp_path / "quickstart.py").write_text("".join(cell.code for cell in cells))
    done = forked.run(["quickstart.py"], tmp_path, 60, stderr=tmp_path / "stderr")
    assert done.returncode == 0, done.stderr
    assert pages.comparable(done.stdout) == pages.comparable("".join(cell.output for cell in cells))


def test_the_first_page_is_a_session() -> None:
    """Its blocks can be pasted into an interpreter one after the other; none waits for another line."""
    session = Session()
    for cell in pages.cells((DOCS / "quickstart.md").read_text()):
        waiting = False
        for line in cell.code.splitlines():
            waiting = session.push(line)
        assert not waiting, f"waits for another line after:\n{cell.code}"
    assert not session.said, "".join(session.said)


class Session(code.InteractiveConsole):
    """Reads statements as the interpreter does, and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def runcode(self, code: CodeType) -> None:
        pass

    def write(self, data: str) -> None:
        self.said.append(data)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_python_from_their_first_line(page: Path) -> None:
    """They are copied from the pages' sources too."""
    blocks = re.findall(r"(?ms)^```(?:python|\{code-cell\})\n(.*?)^```$", page.read_text())
    for block in blocks:
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_cell_is_found(page: Path) -> None:
    """A cell that is written differently would be run by Jupyter only, and its output not compared."""
    text = page.read_text()
    assert text.count("{code-cell}") == len(list(pages.cells(text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_with_cells_are_run_by_jupyter(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("---\nfile_format: mystnb\n") == ("{code-cell}" in text)


def test_the_script_for_several_processes_runs(tmp_path: Path) -> None:
    text = (DOCS / "hosts.md").read_text()
    found = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL)
    assert found is not None
    script, expected = found.groups()
    (tmp_path / "train.py").write_text(script)
    args = [str(EXAMPLES / "_torchrun.py"), "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = forked.run(args, tmp_path, seconds=60, stderr=tmp_path / "stderr")
    assert done.returncode == 0, (tmp_path / "stderr").read_text()
    assert done.stdout == expected


MODULES = (
    *(torchard, torchard.functional, torchard.sharding, torchard.kernels, torchard.testing),
    torchard.testing.strategies,
    *(torchard.machines, torchard.nn, torchard.optim, torchard.policies, torchard.random, torchard.tree),
    *(torchard.transforms, torchard.sharding.testing, torchard.sharding.transports),
)


def _reference() -> list[tuple[str, str]]:
    """The module and name of everything that the reference documents."""
    listed, module = [], ""
    for page in sorted((DOCS / "reference").glob("*.md")):
        for directive, name in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.MULTILINE):
            if directive == "currentmodule":
                module = name
            else:
                listed.append((module, name))
    return listed


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = _reference()
    assert len(listed) == len(set(listed))
    documented = {id(getattr(sys.modules[module], name)) for module, name in listed}
    public = {(m.__name__, n): getattr(m, n) for m in MODULES for n in m.__all__}
    missing = [
        key
        for key, value in public.items()
        if not inspect.ismodule(value) and key not in listed and id(value) not in documented
    ]
    assert not missing


SIGNATURES = """
import importlib, inspect
import conf, test_guide
from sphinx.util.inspect import signature, stringify_signature
for module, name in test_guide._reference():
    value = getattr(importlib.import_module(module), name)
    value = value.__init__ if inspect.isclass(value) else value
    conf._without_checks(None, value, False)
    if inspect.isfunction(value) and "Annotated" in (s := stringify_signature(signature(value))):
        print(f"{module}.{name}{s}")
"""


def test_signatures_of_the_reference_are_those_of_types() -> None:
    """What annotations say to the checks of arguments is left out."""
    pytest.importorskip("sphinx")
    paths = [DOCS, Path(__file__).parent, *map(Path, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", SIGNATURES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
