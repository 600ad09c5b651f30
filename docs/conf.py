"""Configuration of Sphinx: `make docs` builds the guide and the reference; a warning is an error."""

import os
import re
import sys
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
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

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


def _process_docstring(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Change the docstring of a public name before napoleon reads its sections."""
    if kind == "data":
        lines[:] = _docstring_of_constant(name) or lines
    lines[:] = list(_without_remarks(lines))


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


def _without_remarks(lines: list[str]) -> Iterator[str]:
    """Headings such as "Raises (when called):" without the remark, which goes to the entries."""
    remark = ""
    for line in lines:
        heading = re.match(r"(Args|Raises)( \(.*\)):$", line)
        if heading:
            remark = heading[2] if heading[1] == "Raises" else ""
            yield f"{heading[1]}:"
            continue
        if line and not line.startswith(" "):
            remark = ""
        yield re.sub(r"^( {4}\w+:)(?= )", rf"\1{remark}", line)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
