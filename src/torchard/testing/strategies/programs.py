"""Random pure functions."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import strategies as st

from torchard.functional.core.arguments import checked
from torchard.sharding import Mesh
from torchard.testing.strategies.program_builder import ProgramBuilder
from torchard.testing.strategies.random_program import RandomProgram

__all__ = ["programs", "random_program"]


@checked
def programs(
    *,
    max_steps: int = 8,
    dtype: torch.dtype = torch.float64,
    mesh: Mesh | None = None,
    control_flow: bool = False,
) -> st.SearchStrategy[RandomProgram]:
    """A hypothesis strategy of pure functions with inputs, whose operations are typical of models.

    Products, layers of `torchard.nn`, reductions, views, lookups by ids and dropout by a key, of up to
    four floating inputs with up to six entries a dim. Every value is finite and below 10⁴ in magnitude.
    Most inputs are normal, one in eight has small integers.

    Args:
        max_steps: the maximum number of operations of a program.
        dtype: the dtype of the program's floating inputs.
        mesh: if given, steps may also be `torchard.constrain` on this mesh.
        control_flow: whether steps may also be `scan`, `fori_loop`, `while_loop`, `cond` and
            `associative_scan`.

    Returns:
        A strategy of `RandomProgram`. Shrinking can remove any step and inputs that nothing uses, and
        dims shrink towards 1.

    >>> from hypothesis import find
    >>> from torchard.testing import strategies as ts
    >>> find(ts.programs(), lambda program: "layer_norm" in program.source)
    import torch
    from torchard import nn
    <BLANKLINE>
    <BLANKLINE>
    def f(v0):
        v1 = nn.layer_norm(v0)
        return v1
    <BLANKLINE>
    <BLANKLINE>
    inputs = (
        torch.tensor(..., dtype=torch.float64),
    )
    """
    return _programs(max_steps, dtype, mesh, control_flow)


@st.composite
def _programs(
    draw: st.DrawFn, max_steps: int, dtype: torch.dtype, mesh: Mesh | None, control_flow: bool
) -> RandomProgram:
    rng: Random = draw(st.randoms(use_true_random=False))
    builder = ProgramBuilder(rng, dtype, mesh, control_flow)
    # Each step is an element of a list of hypothesis's, so that it can be deleted as one.
    draw(st.lists(st.builds(builder.step), min_size=1, max_size=max_steps))
    return builder.program()


@checked
def random_program(
    seed: int,
    *,
    steps: int = 4,
    dtype: torch.dtype = torch.float64,
    mesh: Mesh | None = None,
    control_flow: bool = False,
) -> RandomProgram:
    """Draw one of `programs` without hypothesis.

    Args:
        seed: the seed of the draw.
        steps: the number of operations; there are fewer if some do not fit.
        dtype: the dtype of the program's floating inputs.
        mesh: the mesh for which values may be constrained; None for no constraints.
        control_flow: whether steps may also be loops and branches.

    Returns:
        A `RandomProgram`.

    >>> from torchard.testing import strategies as ts
    >>> program = ts.random_program(3, steps=3)
    >>> program(*program.inputs).shape
    torch.Size([5, 5])
    """
    builder = ProgramBuilder(Random(seed), dtype, mesh, control_flow)
    for _ in range(steps):
        builder.step()
    return builder.program()
