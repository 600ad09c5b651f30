"""Strategies for hypothesis: tensors, trees, meshes, specs, policies, stacks of transforms, programs.

`torchard.testing` has these names too, and imports this module when one of them is first used: laws and
`localize` work without hypothesis. ``from torchard.testing import strategies as ts`` goes well with
hypothesis's own ``st``.

Values shrink towards readable ones: small integers, dims of size 1, contiguous tensors, few steps.
Importing this module also makes hypothesis print the tensors of a failing example as Python code that
creates them, including their strides.

    from hypothesis import given, strategies as st
    from torchard.testing import check_sharding, strategies as ts

    @given(st.data())
    def test_my_layer(data):
        w, x = data.draw(ts.tensors("o i, ... i"))
        mesh = data.draw(ts.meshes())
        check_sharding(my_layer, mesh, data.draw(ts.specs_for((w, x), mesh)), w, x)
"""

import contextlib
from pathlib import Path

try:
    import hypothesis  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "strategies of torchard.testing need hypothesis: pip install 'torchard[hypothesis]'.",
        name=error.name,
    ) from error

from torchard.testing.strategies.modules import modules
from torchard.testing.strategies.placements import meshes, specs_for
from torchard.testing.strategies.programs import programs, random_program
from torchard.testing.strategies.random_program import RandomProgram
from torchard.testing.strategies.tensors import tensors
from torchard.testing.strategies.transforms import policies, stacks
from torchard.testing.strategies.trees import keys, pytrees

with contextlib.suppress(ImportError, AttributeError):
    # Lines that only failing examples run are explained by hypothesis; those of this library are no help.
    from hypothesis.internal import scrutineer

    library = Path(__file__).parents[2]
    scrutineer.UNHELPFUL_LOCATIONS += (f"{library.as_posix()}/**",)  # type: ignore[assignment]

__all__ = [
    "RandomProgram",
    "keys",
    "meshes",
    "modules",
    "policies",
    "programs",
    "pytrees",
    "random_program",
    "specs_for",
    "stacks",
    "tensors",
]
