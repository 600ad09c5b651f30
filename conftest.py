"""What every test shares: one thread, a fixed seed, derandomised property tests.

The examples of README.md, GUIDE.md and docstrings are tests as well; Sybil collects them.
"""

import gc
import os
from pathlib import Path

import pytest
import torch
from docstrings import DocstringDocument, DocstringExamples
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.sybil import SybilCollection

SEED = 20_111_112
ROOT = Path(__file__).resolve().parent

# Tests run in several processes at once; each process's torch then wants one core.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # those it starts, too
gc.set_threshold(5000, 20, 20)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci")

pages = Sybil(
    [PythonCodeBlockParser()],
    path=str(ROOT),
    patterns=["README.md", "GUIDE.md"],
    fixtures=["manual_seed"],
)
sources = DocstringExamples(
    [],
    path=str(ROOT / "src"),
    pattern="**/*.py",
    fixtures=["manual_seed"],
    document_types={".py": DocstringDocument},
)
pytest_collect_file = SybilCollection([pages, sources]).pytest()


def pytest_report_header() -> str:
    profile = settings.get_current_profile_name()
    how = "derandomised" if settings.default.derandomize else "random, see the printed seed"
    return f"torch {torch.__version__}, manual seed {SEED}, hypothesis profile {profile} ({how})"


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays() -> None:
    """Collections do not look again and again through what was imported or cached before."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is frozen at the end of the process looks leaked to extension modules."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def manual_seed() -> None:
    """The library has no global random state; tests that draw inputs from torch's get this one."""
    torch.manual_seed(SEED)
