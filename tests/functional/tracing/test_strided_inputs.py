"""What reads an argument's memory by strides: as torch does, or refused by name.

torch alone is the reference, other samples of a batch and memory around a view included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivation_cases import MESH, TRANSFORMS, crossed, same, whole
from refusals import refuses
from torch.func import grad, jvp, vmap

from torchard.sharding import P, place, shard

Fn = Callable[..., Any]

READINGS: dict[str, Fn] = {
    "from the tensor on": lambda x: x.as_strided((2, 2), (1, 2)),
    "from an offset": lambda x: x.as_strided((2, 2), (1, 2), 1),
    "from the storage's start": lambda x: x.as_strided((2, 3), (2, 1), 0).sin(),
    "a row of it": lambda x: x[1].as_strided((2,), (1,)),
    "a copy": lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), 1),
    "scattered": lambda x: torch.as_strided_scatter(x, torch.ones(2, 2).to(x), (2, 2), (1, 2), 1),
}

X = torch.randn(4, 3, 3, dtype=torch.float64)

# Three dims each, and what is read are matrices.
LAYOUTS: dict[str, torch.Tensor] = {
    "contiguous": X,
    "from its second on": X[1:],
    "of its columns": X[:, :, 1:],
    "by columns": X.mT,
    "expanded": X[0].expand(2, 3, 3),
    "a batch in the middle": X.transpose(0, 1).contiguous().transpose(0, 1),
    "a batch at the end": X.movedim(0, 2).contiguous().movedim(2, 0),
}


def squares(f: Fn) -> Fn:
    return lambda x: f(x).square().sum()


STACKS: dict[str, Callable[[Fn, Fn], Fn]] = {
    "of one": lambda t, f: lambda x: t(f)(x[0]),
    "of another": lambda t, f: lambda x: t(f)(x[1]),
    "inside": lambda t, f: t(lambda x: f(x[1])),
    "closed over": lambda t, f: lambda x: t(lambda: f(x[1]))(),
    "twice": lambda t, f: t(lambda x: whole(t(f)(x[1]))),
    "gradient": lambda t, f: lambda x: grad(squares(lambda x: whole(t(f)(x))))(x[1]),
    "of a gradient": lambda t, f: lambda x: t(grad(squares(f)))(x[1]),
    "tangent": lambda t, f: lambda x: jvp(lambda x: whole(t(f)(x)), (x[1],), (x[1],))[1],
    "batch": lambda t, f: vmap(lambda x: whole(t(f)(x))),
    "batch, twice": lambda t, f: vmap(lambda x: whole(t(lambda x: whole(shard(f, MESH)(x)))(x))),
    "of a batch": lambda t, f: t(vmap(f)),
    "batch of gradients": lambda t, f: vmap(grad(squares(lambda x: whole(t(f)(x))))),
    "not in the batch": lambda t, f: (
        lambda x: vmap(lambda y: whole(t(f)(x[0])) + y)(torch.ones(2, 1))
    ),
}


@pytest.mark.sampled(4)
@crossed("layout", LAYOUTS)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("reading", READINGS)
def test_what_is_read_by_strides(reading: str, stack: str, layout: str, name: str) -> None:
    read, x, stacked = READINGS[reading], LAYOUTS[layout], STACKS[stack]
    try:
        want = stacked(lambda f: f, read)(x)
    except RuntimeError:
        return  # torch refuses
    try:
        found = whole(stacked(TRANSFORMS[name], read)(x))
    except Exception as error:
        assert refuses(error)
        assert "as_strided" in str(error) and "test_strided_inputs.py:" in str(error)
        return
    same(found, want)


@crossed("reading", [r for r in READINGS if r not in ("a row of it", "scattered")])
def test_what_lies_as_in_the_trace_is_not_refused(reading: str, name: str) -> None:
    read, transform = READINGS[reading], TRANSFORMS[name]
    same(whole(transform(read)(X[0])), read(X[0]))
    same(vmap(lambda x: whole(transform(read)(x)))(X), torch.stack([read(x.clone()) for x in X]))
    same(grad(squares(lambda x: whole(transform(read)(x))))(X[0]), grad(squares(read))(X[0]))
    placed = place(X[0], MESH, P("dp"))
    same(whole(transform(read)(placed)), read(X[0]))
