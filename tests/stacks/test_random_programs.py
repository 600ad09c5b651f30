"""Random programs × meshes × specs × constraints: shard changes neither values nor gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, seed, settings
from random_programs import Example, _program, programs

from torchard.sharding import Mesh
from torchard.sharding.rules import REGISTRY
from torchard.sharding.rules.compute.pointwise import _linear_each
from torchard.sharding.rules.registry import OpRule
from torchard.sharding.testing import check_sharded

aten = torch.ops.aten
PARTS = 5
EXAMPLES = examples(ci=45, explore=400)  # of each part, both ways
quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def outside(example: Example) -> None:
    """Gradients through the sharded function."""
    check_sharded(
        example,
        example.inputs,
        example.mesh,
        example.in_specs,
        example.out_specs,
        placed=example.placed,
    )


def inside(example: Example) -> None:
    """The sharded function takes the gradients itself: another way through the library."""
    check_sharded(
        example.gradients,
        example.inputs,
        example.mesh,
        example.in_specs,
        grads=False,
        placed=example.placed,
    )


def both(example: Example) -> None:
    """What one way is right on, the other must be, too."""
    outside(example)
    inside(example)


def search(check: Callable[[Example], None], part: int, count: int) -> None:
    """A part's own examples; others, longer, with ``--hypothesis-profile=explore``."""
    fixed = settings.get_current_profile_name() == "ci"

    @settings(
        max_examples=count,
        database=None,
        derandomize=False,
        deadline=None,
        suppress_health_check=quiet,
    )
    @given(programs(5 if fixed else 8))
    def run(example: Example) -> None:
        check(example)

    (seed(part)(run) if fixed else run)()


# In parts, so that the processes of a test run can share them.
@pytest.mark.parametrize("part", range(PARTS))
def test_values_and_gradients_equal_the_plain_functions(part: int) -> None:
    search(both, part, EXAMPLES)


# Wrong rules, and for each a number: among the fifty programs from there on, one shows it.
# By number, not drawn: hypothesis also tries literals of whatever modules a process has loaded.
BROKEN = {
    "softmax split along its dim": (aten._softmax.default, OpRule("... -> ..."), 50),
    "maxima added up": (aten.amax.default, REGISTRY[aten.sum.dim_IntList], 50),
    "a product linear in both": (
        aten.mul.Tensor,
        OpRule(lambda c: f"{_linear_each(c)} | linear 0 1"),
        0,
    ),
    "rows gathered without a mask": (
        aten.index.Tensor,
        OpRule(REGISTRY[aten.index.Tensor].text),
        50,
    ),
    "sums joined by their largest": (aten.sum.dim_IntList, REGISTRY[aten.amax.default], 0),
}


MESHES = (Mesh({"dp": 2, "tp": 2}, virtual=True), Mesh({"dp": 3}, virtual=True))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rule, first = BROKEN[name]
    monkeypatch.setitem(REGISTRY, target, rule)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for number in range(first, first + 50):
            outside(_program(number, MESHES[number % 2], 5))


@pytest.mark.parametrize(("number", "mesh", "length"), [(2776468, (1, 2, 4), 7)])
def test_a_program_that_failed_once(number: int, mesh: tuple[int, ...], length: int) -> None:
    """A merged all_reduce had a view, which nothing used, in front of it."""
    axes = dict(zip(("dp", "tp", "pp"), mesh, strict=True))
    inside(_program(number, Mesh(axes, virtual=True), length))
