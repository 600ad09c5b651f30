"""Configuration of Sphinx: `make docs` builds the guide and the reference; a warning is an error."""

import os

import torchard

project = "torchard"
version = release = torchard.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
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
autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

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
