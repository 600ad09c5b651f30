"""Pages of the guide: their code is run, and what it prints is what stands below it.

The cells of a page, one below the other, are a file of the page's name, of which the tables name lines.
What a cell prints is in the block ```` ```text ```` that follows it; a cell without such a block prints
nothing. Errors of rounding, numbers such as 1.19e-07, depend on the processor and are not compared. To
write into pages what their cells print::

    python tests/support/pages.py docs/quickstart.md ...
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import ROOT
from sybil import Document, Example, Region

__all__ = ["Cell", "CellParser", "cells", "comparable"]

_CELL = re.compile(
    r"^```\{code-cell\}\n(?P<code>.*?)^```$"
    r"(?P<shown>\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_OUTPUT = "\n\n```text\n{}```"


@dataclass(frozen=True)
class Cell:
    """A cell of a page.

    Attributes:
        line: the number of lines of code before it.
        output: what the page says that it prints.
        start, end: where it is on the page, with its output.
    """

    code: str
    line: int
    output: str
    start: int
    end: int

    def run(self, page: str, namespace: dict[str, Any]) -> str:
        """Run it as lines of the file ``page.py``, and return what it prints."""
        code = compile("\n" * self.line + self.code, f"{page}.py", "exec")
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            exec(code, namespace)
        return printed.getvalue()


def cells(text: str) -> Iterator[Cell]:
    """The cells of a page, in order."""
    line = 0
    for match in _CELL.finditer(text):
        yield Cell(match["code"], line, match["output"] or "", match.start(), match.end())
        line += match["code"].count("\n")


class CellParser:
    """Sybil's parser of pages: an example for each cell."""

    def __call__(self, document: Document) -> Iterator[Region]:
        for cell in cells(document.text):
            yield Region(cell.start, cell.end, cell, _check)


def _check(example: Example) -> str:
    cell: Cell = example.parsed
    example.namespace.setdefault("__name__", "__main__")
    printed = cell.run(Path(example.path).stem, example.namespace)
    if comparable(printed) == comparable(cell.output):
        return ""
    return f"expected:\n{_indented(cell.output)}\nprinted:\n{_indented(printed)}"


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def comparable(text: str) -> str:
    """What is printed, without errors of rounding, and without spaces at the ends of lines."""
    text = re.sub(r"\d\.\d+e[-+]\d\d", "?", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _write(path: Path) -> None:
    """Put below each cell of a page what it prints."""
    text, namespace, end = path.read_text(), {"__name__": "__main__"}, 0
    parts = []
    for cell in cells(text):
        printed = "".join(
            f"{line.rstrip()}\n" for line in cell.run(path.stem, namespace).splitlines()
        )
        code = text[cell.start : text.index("\n```", cell.start) + 4]
        parts += [text[end : cell.start], code, _OUTPUT.format(printed) if printed else ""]
        end = cell.end
    path.write_text("".join([*parts, text[end:]]))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for name in sys.argv[1:] or sorted(map(str, (ROOT / "docs").glob("*.md"))):
        _write(Path(name))
