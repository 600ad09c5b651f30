"""Fixtures for pytest: virtual meshes, two ranks of gloo, and a seed that is printed and replayed.

Write into the root's ``conftest.py``::

    pytest_plugins = ["torchard.testing.pytest_plugin"]
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
import torch

from torchard.functional import random
from torchard.sharding import Mesh
from torchard.testing.rank_pool import RankPool

__all__ = ["torchard_key", "torchard_seed", "two_ranks", "virtual_mesh"]

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torchard-seed",
        type=int,
        help="the seed of torchard_seed, torchard_key and hypothesis; by default it is drawn and printed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Decide the seed, before hypothesis reads its own."""
    given: int | None = config.getoption("--torchard-seed")
    from_controller: dict[str, int] = getattr(config, "workerinput", {})
    drawn = from_controller.get("torchard_seed", secrets.randbelow(2**31))
    config.stash[_SEED] = drawn if given is None else given
    if given is not None and getattr(config.option, "hypothesis_seed", 0) is None:
        config.option.hypothesis_seed = str(given)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Give processes of pytest-xdist the seed of this one."""
    node.workerinput["torchard_seed"] = node.config.stash[_SEED]  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> str:
    return f"torchard seed: {config.stash[_SEED]} (the same again: --torchard-seed={config.stash[_SEED]})"


@pytest.fixture
def torchard_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, with which torch's generator is seeded too."""
    seed = request.config.stash[_SEED]
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def torchard_key(torchard_seed: int) -> torch.Tensor:
    """A key for `torchard.random`, from the seed of this run."""
    return random.key(torchard_seed)


@pytest.fixture
def virtual_mesh() -> Callable[..., Mesh]:
    """Makes meshes of virtual ranks: ``virtual_mesh(dp=2, tp=4)``."""

    def make(**axes: int) -> Mesh:
        return Mesh(axes, virtual=True)

    return make


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks of gloo for the tests of a module: ``two_ranks(fn, *args)`` is what each returns."""
    with RankPool(2) as ranks:
        yield ranks
