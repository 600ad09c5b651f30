"""Random programs × meshes × specs × constraints: shard changes neither values nor gradients."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings
from random_programs import Example, programs

from torchard.sharding.testing import check_sharded

SLICES, EXAMPLES = 6, 200
quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def check(example: Example) -> None:
    check_sharded(
        example,
        example.inputs,
        example.mesh,
        example.in_specs,
        example.out_specs,
        placed=example.placed,
    )


@pytest.mark.parametrize("part", range(SLICES))
def test_random_programs(part: int) -> None:
    """Values and gradients equal the plain function's. Parts, so that processes can share them."""

    @seed(part)
    @settings(max_examples=EXAMPLES, database=None, derandomize=False, suppress_health_check=quiet)
    @given(programs())
    def run(example: Example) -> None:
        check(example)

    run()
