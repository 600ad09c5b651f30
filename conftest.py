"""Configuration of all tests: one thread, a fixed seed, derandomized property tests.

The examples in README.md, docs and docstrings are tests as well, collected by Sybil.
"""

import gc
import os
from pathlib import Path

import pytest
import torch
from docstrings import DocstringDocument, DocstringExamples
from hypothesis import settings
from pages import CellParser
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.sybil import SybilCollection

pytest_plugins = ["torchard.testing.pytest_plugin"]

SEED = 20_111_112
ROOT = Path(__file__).resolve().parent

# Tests run in several processes at once, so each of them uses one thread.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")  # pictures are drawn, not shown
# Inductor's pool of processes, which each load torch, has nothing to do but on CUDA devices.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
gc.set_threshold(5000, 20, 20)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci")

pages = Sybil(
    [PythonCodeBlockParser()],
    path=str(ROOT),
    pattern="README.md",
    fixtures=["manual_seed"],
)
guide = Sybil([CellParser()], path=str(ROOT / "docs"), pattern="*.md", fixtures=["manual_seed"])
sources = DocstringExamples(
    [],
    path=str(ROOT / "src"),
    pattern="**/*.py",
    fixtures=["manual_seed"],
    document_types={".py": DocstringDocument},
)
pytest_collect_file = SybilCollection([pages, guide, sources]).pytest()


def pytest_report_header() -> str:
    profile = settings.get_current_profile_name()
    how = "derandomized" if settings.default.derandomize else "random, see the printed seed"
    return f"torch {torch.__version__}, manual seed {SEED}, hypothesis profile {profile} ({how})"


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Exclude what earlier modules imported and cached from garbage collection, which saves time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Unfreeze: to extension modules, objects that are frozen at exit look like leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def manual_seed() -> None:
    """Seed torch's global generator, from which tests draw inputs; the library itself does not use it."""
    torch.manual_seed(SEED)
