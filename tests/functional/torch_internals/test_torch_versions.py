"""Other versions of torch: operators that are not there, and the range that is tested."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib

import pytest
import torch
from paths import ROOT

import torchard
from torchard.functional.core.errors import TorchVersionWarning
from torchard.functional.torch_internals import operators, versions
from torchard.functional.torch_internals.operators import Absent, aten
from torchard.sharding.rules import lookup, register_rule

LIBRARY = [p for room in ("functional", "sharding", "kernels") for p in (ROOT / room).rglob("*.py")]
PINNED = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)


def test_an_operator_that_is_not_there_may_be_named() -> None:
    gone = aten.an_operator_of_another_version.default
    assert isinstance(gone, Absent)
    assert aten.an_operator_of_another_version.default is gone
    assert isinstance(aten.add.an_overload_of_another_version, Absent)
    register_rule(gone, text="... -> ...")
    assert lookup(gone) is None
    with pytest.raises(NotImplementedError, match=r"no operator aten\.an_operator_of_another"):
        gone(torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"no operator aten\.an_operator_of_another"):
        aten.an_operator_of_another_version(torch.ones(2))


def test_operators_that_are_there_are_torchs_own() -> None:
    assert aten.add.Tensor is torch.ops.aten.add.Tensor
    assert torch.equal(aten.add(torch.ones(2), 1), torch.full((2,), 2.0))


@pytest.mark.skipif(
    not torch.__version__.startswith(PINNED), reason=f"says what the pinned torch {PINNED} has"
)
def test_the_pinned_torch_has_every_operator_that_is_named() -> None:
    """A misspelt name must not pass for an operator of another version."""
    for module in pkgutil.walk_packages(torchard.__path__, "torchard."):
        if not module.name.startswith("torchard.kernels.triton"):  # needs a package of its own
            importlib.import_module(module.name)
    named = {
        found
        for path in LIBRARY
        for found in re.findall(r"\baten\.(\w+)\.([a-zA-Z]\w*)", path.read_text())
    }
    for operator, overload in named:
        getattr(getattr(aten, operator), overload)
    assert not [name for name in operators.missing() if "of_another_version" not in name]


def test_operators_are_looked_up_in_one_place() -> None:
    """``torch.ops.aten.x.y`` of a version without it would fail at import."""
    direct = {
        path.name
        for path in LIBRARY
        for node in ast.walk(ast.parse(path.read_text()))  # in code: users' may, so examples do
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.ops.aten", "torch.ops.prims")
    }
    assert direct <= {"tensors.py"}  # which asks what an operator has, of one that all versions have


def test_pyproject_asks_for_the_range_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_range,) = [d for d in project["dependencies"] if d.startswith("torch>=")]
    (low, high) = versions.OLDEST, versions.NEWEST
    assert torch_range == f"torch>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git1234", "3.0.0", "1.13.1"])
def test_beyond_the_range_is_a_warning(version: str) -> None:
    with pytest.warns(TorchVersionWarning, match=re.escape(f"this is torch {version}")):
        versions.check(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1", "unknown"])
def test_within_the_range_nothing_is_said(version: str) -> None:
    versions.check(version)
