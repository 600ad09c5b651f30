"""Configuration of Sphinx: `make docs` builds the guide and the reference; a warning is an error."""

import contextlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Iterator
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docstrings import prepare_docstring

import torchard

project = "torchard"
version = release = torchard.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]

# Pages are run by Jupyter; an exception is an error. What a cell prints is in the source of its page,
# where tests compare it, so only pictures are taken from the run.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_remove_code_outputs = True
nb_execution_show_tb = True
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernels of Jupyter
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# In docstrings, names in single backticks are links where there is such a name.
default_role = "py:obj"
autodoc_default_options = {"members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "alabaster"
html_static_path = ["_static"]
html_css_files = ["guide.css"]
html_theme_options = {
    "description": "Composable function transforms for PyTorch",
    "fixed_sidebar": True,
    "page_width": "1200px",
    "show_powered_by": False,
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False


def _before_napoleon(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = list(_plain_sections(lines))


def _after_napoleon(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Docstrings of constants have no sections; napoleon would take what is before a colon for a type."""
    if kind == "data":
        lines[:] = _docstring_of_constant(name) or prepare_docstring(inspect.getdoc(value) or "")


def _without_checks(app: Sphinx, value: object, bound: bool) -> None:
    """Annotations without what they say to checks: ``Annotated[int, AtLeast(1)]`` is an int."""
    if not inspect.isfunction(value):
        return
    with contextlib.suppress(NameError):  # a name of the module that a class inherits its fields from
        plain = typing.get_type_hints(value)
        inspect.unwrap(value).__annotations__ = value.__annotations__ = plain


def _short_signature(
    app: Sphinx,
    kind: str,
    name: str,
    value: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """A signature with ``...`` for defaults that are made anew."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def _show_pictures(app: Sphinx, page: str, source: list[str]) -> None:
    """Cells that draw show what they return: an option in the cell itself would be no Python."""
    cells = re.split(r"(?m)^(?=```\{code-cell\}$)", source[0])
    source[0] = "".join(
        cell.replace("\n", "\n:mystnb: {remove_code_outputs: false}\n\n", 1) if _draws(cell) else cell
        for cell in cells
    )


def _draws(cell: str) -> bool:
    return cell.startswith("```{code-cell}") and "pyplot." in cell.partition("\n```")[0]


def _docstring_of_constant(name: str) -> list[str]:
    """The docstring of a constant that a public module takes from the module that defines it.

    Sphinx looks for it in the source of the public module only.
    """
    module, _, constant = name.rpartition(".")
    for behind in _defining(sys.modules[module]):
        docstring = ModuleAnalyzer.for_module(behind).find_attr_docs().get(("", constant))
        if docstring:
            return prepare_docstring("\n".join(docstring))
    return []


def _defining(module: ModuleType) -> list[str]:
    """A module, and those that its functions and classes are defined in."""
    values = [getattr(module, name) for name in module.__all__]
    modules = [value.__module__ for value in values if hasattr(value, "__module__")]
    return list(dict.fromkeys([module.__name__, *modules]))


def _plain_sections(lines: list[str]) -> Iterator[str]:
    """Sections as napoleon reads them.

    A remark in a heading, as in "Raises (when called):", goes to the entries; attributes that share an
    entry are joined by slashes.
    """
    section = remark = ""
    for line in lines:
        if heading := re.match(r"(Args|Raises|Attributes)( \(.*\))?:$", line):
            section = heading[1]
            remark = (heading[2] or "") if section == "Raises" else ""
            yield f"{section}:"
            continue
        if line and not line.startswith(" "):
            section = remark = ""
        if entry := re.match(r" {4}(\w[\w, ]*): ", line):
            names = entry[1].replace(", ", "/") if section == "Attributes" else entry[1]
            line = f"    {names}:{remark} {line[entry.end() :]}"
        yield line


def setup(app: Sphinx) -> None:
    app.connect("source-read", _show_pictures)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.connect("autodoc-before-process-signature", _without_checks)
    app.connect("autodoc-process-signature", _short_signature)
