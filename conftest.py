"""Configuration of all tests: one thread, a fixed seed, derandomized property tests.

The examples in README.md, docs and docstrings are tests as well, collected by Sybil.
"""

import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from docstrings import DocstringDocument, DocstringExamples
from hypothesis import settings
from pages import CellParser
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.sybil import SybilCollection

pytest_plugins = ["torchard.testing.pytest_plugin", "hang_limits"]

SEED = 20_111_112
# By test and parameter, the values' ids in the order in which cases have them.
_given: dict[tuple[object, str], dict[int, int]] = defaultdict(dict)
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out some cases of products with many, except under another profile and with --all-cases."""
    if config.option.all_cases or settings.get_current_profile_name() != "ci":
        return
    left_out = {item for item in items if _is_left_out(item)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    """By its name, so that the same ones run each time; another half of each test's cases.

    Or by its place along each parameter, so that of a product of few every value of each is left.
    """
    marker, turns = map(item.get_closest_marker, ("sampled", "in_turn"))
    if turns is not None:
        return sum(_places(item)) % turns.args[0] > 0
    return marker is not None and zlib.crc32(item.nodeid.encode()) % marker.args[0] > 0


def _places(item: Any) -> Iterator[int]:
    """Of each parameter's value, its number among those that the test is given."""
    for name, value in item.callspec.params.items():
        known = _given[item.function, name]
        yield known.setdefault(id(value), len(known))


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "run what sampled(n) and in_turn(n) leave out, too"
    parser.addoption("--all-cases", action="store_true", help=said)


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
    # Not torch.manual_seed, which keeps the stack of each call for devices that are not there.
    torch.default_generator.manual_seed(SEED)
