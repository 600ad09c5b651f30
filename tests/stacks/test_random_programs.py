"""Random programs × meshes × specs × constraints: shard changes neither values nor gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, seed, settings
from sharded_programs import ShardedProgram, equal_when_sharded, numbered, of_all, sharded_programs

from torchard.functional import nn
from torchard.sharding import Mesh, P
from torchard.sharding.rules import REGISTRY
from torchard.sharding.rules.compute.pointwise import _linear_each
from torchard.sharding.rules.registry import OpRule

aten = torch.ops.aten
PARTS = 5
EXAMPLES = examples(ci=10, explore=400)  # of each part, both ways
quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def outside(case: ShardedProgram) -> None:
    """Gradients through the sharded function."""
    program = case.program
    equal_when_sharded(
        program, program.inputs, case.mesh, case.in_specs, case.out_specs, placed=case.placed
    )


def inside(case: ShardedProgram) -> None:
    """The sharded function takes the gradients itself: another way through the library."""
    program = case.program
    gradients = of_all(program, program.inputs)
    equal_when_sharded(
        gradients, program.inputs, case.mesh, case.in_specs, orders=["value"], placed=case.placed
    )


def both(case: ShardedProgram) -> None:
    """What one way is right on, the other must be, too."""
    outside(case)
    inside(case)


def search(check: Callable[[ShardedProgram], None], part: int, count: int) -> None:
    """A part's own examples; others, longer, with ``--hypothesis-profile=explore``."""
    fixed = settings.get_current_profile_name() == "ci"

    @settings(
        max_examples=count,
        database=None,
        derandomize=False,
        deadline=None,
        suppress_health_check=quiet,
    )
    @given(sharded_programs(max_steps=5 if fixed else 8))
    def run(case: ShardedProgram) -> None:
        check(case)

    (seed(part)(run) if fixed else run)()


# In parts, so that the processes of a test run can share them.
@pytest.mark.parametrize("part", range(PARTS))
def test_values_and_gradients_equal_the_plain_functions(part: int) -> None:
    search(both, part, EXAMPLES)


# Wrong rules, and for each a number: among the fifty programs from there on, one shows it.
# By number, not drawn: hypothesis also tries literals of whatever modules a process has loaded.
BROKEN = {
    "softmax split along its dim": (aten._softmax.default, OpRule("... -> ..."), 0),
    "maxima added up": (aten.amax.default, REGISTRY[aten.sum.dim_IntList], 104),
    "a product linear in both": (
        aten.mul.Tensor,
        OpRule(lambda c: f"{_linear_each(c)} | linear 0 1"),
        0,
    ),
    "rows gathered without a mask": (
        aten.index.Tensor,
        OpRule(REGISTRY[aten.index.Tensor].text),
        140,
    ),
    "sums joined by their largest": (aten.sum.dim_IntList, REGISTRY[aten.amax.default], 15),
}


MESHES = (Mesh({"dp": 2, "tp": 2}, virtual=True), Mesh({"dp": 3}, virtual=True))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rule, first = BROKEN[name]
    monkeypatch.setitem(REGISTRY, target, rule)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        for number in range(first, first + 50):
            outside(numbered(number, MESHES[number % 2], steps=5))


def _with_an_unused_view(
    w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, unused: torch.Tensor
) -> torch.Tensor:
    quotient = b / (a * a + 1)
    y = nn.linear(quotient, w)
    y.expand([4, 5, 3, 3])
    quotient * (w + torch.arange(w.shape[-1]) * 0.1)
    b.roll(1, -2)
    return y.sum([-1, 1], keepdim=True)


def test_a_program_that_failed_once() -> None:
    """A merged all_reduce had a view, which nothing used, in front of it."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 1), (1, 1), (5, 3, 1))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    inputs.append(torch.tensor(1))
    specs = (P(None, ("dp", "tp")), P(None, "dp"), P(None, ("pp", "tp")), P())
    mesh = Mesh({"dp": 1, "tp": 2, "pp": 4}, virtual=True)
    gradients = of_all(_with_an_unused_view, inputs)
    equal_when_sharded(gradients, tuple(inputs), mesh, specs, orders=["value"])
