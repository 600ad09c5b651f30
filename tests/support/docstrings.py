"""Docstrings of the library: where they stand, and how their examples are run.

An example is all of a docstring's ``>>>`` lines together, in a namespace and an empty folder of its own:
what it uses, it imports. Expected output may be wrapped differently and shortened by ``...``; an
exception of the library's goes by its public name (``torchard.SpecError``), wherever the file is that
defines it. An example whose first line is ``# torchrun --nproc-per-node 2`` is run by so many ranks.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paths import EXAMPLES
from sybil import Document, Example, Region, Sybil
from sybil.typing import Parser

__all__ = ["DocstringDocument", "DocstringExamples", "docstrings", "report"]

HERE = Path(__file__).resolve().parent
# For the processes of one example.
SECONDS = 60
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

Documented = ast.FunctionDef | ast.ClassDef | ast.Module


def docstrings(source: str) -> dict[str, ast.Constant]:
    """The string that documents each name of a module: ``"P.factors"``, ``""`` for the module itself.

    A constant is documented by the string that follows its assignment.
    """
    return dict(_docstrings(ast.parse(source), ""))


def _docstrings(node: Documented, path: str) -> Iterator[tuple[str, ast.Constant]]:
    if node.body and (own := _string(node.body[0])):
        yield path, own
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        name = _name(statement)
        inner = f"{path}.{name}" if path else name
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _docstrings(statement, inner)
        elif name and (own := _string(after)):
            yield inner, own


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def _string(statement: ast.stmt | None) -> ast.Constant | None:
    match statement:
        case ast.Expr(value=ast.Constant(value=str()) as constant):
            return constant
    return None


class DocstringDocument(Document):
    """A source file of which only docstrings are read; it is not imported from here."""

    @classmethod
    def parse(cls, path: str, *parsers: Parser, encoding: str = "utf-8") -> DocstringDocument:
        text = Path(path).read_text(encoding)
        document = cls(text, path)
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        for name, constant in docstrings(text).items():
            test = doctest.DocTestParser().get_doctest(
                constant.value, {}, name or Path(path).stem, path, constant.lineno - 1
            )
            if test.examples:
                first = starts[constant.lineno - 1 + test.examples[0].lineno]
                last = starts[constant.end_lineno - 1] + constant.end_col_offset
                document.add(Region(first, last, test, _run))
        return document


class DocstringExamples(Sybil):
    """Tests that are called as what they document: ``src/torchard/functional/nn.py::linear``."""

    def identify(self, example: Example) -> str:
        name: str = example.parsed.name
        return name


def _run(example: Example) -> str:
    """The report of what fails, or nothing."""
    test: doctest.DocTest = example.parsed
    ranks = _RANKS.match(test.docstring[test.docstring.index(">>>") :])
    return report(test) if ranks is None else _of_ranks(test, ranks[1])


# The first line of an example that several processes run; what rank 0 prints is compared.
_RANKS = re.compile(r">>> # torchrun --nproc-per-node (\d+)\n")


def report(test: doctest.DocTest) -> str:
    """What is not as the docstring says, when it is run in this process."""
    test.globs = {"__name__": "__main__"}
    said: list[str] = []
    runner = doctest.DocTestRunner(_Checker(), verbose=False, optionflags=OPTIONS)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        runner.run(test, out=said.append)
    return "".join(said)


def _of_ranks(test: doctest.DocTest, ranks: str) -> str:
    import forked  # which sets up a process of its own

    torchrun, script = EXAMPLES / "_torchrun.py", HERE / "docstring_ranks.py"
    args = [str(torchrun), "--nproc-per-node", ranks, str(script), str(test.filename), test.name]
    with tempfile.TemporaryDirectory() as folder:
        done = forked.run(args, Path(folder), seconds=SECONDS, stderr=Path(folder) / "stderr")
    return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"


class _Checker(doctest.OutputChecker):
    _PRIVATE = re.compile(r"^torchard\.([a-z_]+\.)+(?=[A-Z]\w*:)")

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, self._PRIVATE.sub("torchard.", got), optionflags)
