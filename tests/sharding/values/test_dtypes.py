"""Values of every dtype that torch has on a CPU, moved, looked up and cast by sharded functions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchard import Mesh, MeshTensor, P, place, shard
from torchard.functional.core.tensor_spec import holds

MESH = Mesh({"dp": 2}, virtual=True)
IDS = torch.tensor([3, 0, 2, 2])
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)
DTYPES = (
    *(*FLOATS, *FLOAT8, torch.complex32, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
SPECS = (P("dp"), P(None, "dp"), P())

# What none of them rounds: so results are compared bit by bit.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x.to(torch.complex64 if x.is_complex() else torch.float32),
    "transpose": lambda x: x.t(),
    "flatten": lambda x: x.reshape(-1),
    "row": lambda x: x[3],
    "rows": lambda x: x[1:4],
    "index": lambda x: x[IDS],
    "index_select": lambda x: x.index_select(0, IDS),
    "gather": lambda x: x.gather(0, IDS[:, None].expand(4, 6)),
    "take": lambda x: x.take(IDS),
    "embedding": lambda x: F.embedding(IDS, x),
    "cat": lambda x: torch.cat([x, x[:1]]),
    "stack": lambda x: torch.stack([x, x]),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (1, 1, 1, 0)),
    "where": lambda x: torch.where(torch.ones(4, 6, dtype=torch.bool), x, x),
    "masked_fill": lambda x: x.masked_fill(torch.eye(4, 6, dtype=torch.bool), 1),
    "repeat": lambda x: x.repeat(2, 2),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "unbind": lambda x: x.unbind(0)[2],
    "index_put": lambda x: x.index_put((IDS,), x[IDS]),
    "index_copy": lambda x: x.index_copy(0, IDS[:2], x[:2]),
    "select_scatter": lambda x: x.select_scatter(x[0], 0, 3),
    "slice_scatter": lambda x: x.slice_scatter(x[:1], 0, 1, 2),
}


def _bits(value: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(value.to(torch.complex64)) if value.is_complex() else value
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.contiguous().view(as_bits[value.element_size()])


def _value(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator).abs().mul(3).to(dtype)


def _check(name: str, dtype: torch.dtype, spec: P, out_spec: P | None) -> bool:
    """Whether torch has the function for the dtype; if so, the sharded function must agree."""
    fn, x = FUNCTIONS[name], _value(dtype)
    try:
        want = fn(x)
    except (RuntimeError, NotImplementedError):
        return False
    have: Any = shard(fn, MESH, in_specs=spec, out_specs=out_spec)(x)
    have = have.full() if isinstance(have, MeshTensor) else have
    assert (have.dtype, have.shape) == (want.dtype, want.shape), (name, spec)
    assert torch.equal(_bits(have), _bits(want)), (name, spec)
    return True


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_torch_moves_is_moved(dtype: torch.dtype) -> None:
    ways = list(itertools.product(FUNCTIONS, SPECS, (None, P("dp"))))
    chosen = random.Random(str(dtype)).sample(ways, 24)
    assert sum(_check(name, dtype, spec, out_spec) for name, spec, out_spec in chosen) >= 12


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_split_table_is_looked_up_in_its_dtype(dtype: torch.dtype) -> None:
    for name in ("cast", "row", "index", "gather", "embedding"):
        _check(name, dtype, P("dp"), None)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_placed_and_moved(dtype: torch.dtype) -> None:
    x = _value(dtype)
    placed = place(x, MESH, P("dp"))
    for spec in SPECS:
        assert torch.equal(_bits(placed.redistribute(spec).full()), _bits(x))


def test_a_dtype_holds_another_as_torch_promotes() -> None:
    for wide, narrow in itertools.product(FLOATS, FLOATS):
        assert holds(wide, narrow) == (torch.promote_types(wide, narrow) == wide)
    assert not holds(torch.float32, torch.int8)
    assert holds(torch.int8, torch.int8)


@pytest.mark.parametrize("narrow", FLOAT8, ids=str)
def test_what_holds_a_float8_has_all_its_values(narrow: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(narrow)
    for wide in filter(lambda wide: holds(wide, narrow), FLOATS):
        exact = values.to(wide).double()
        assert torch.equal(exact.nan_to_num(5), values.double().nan_to_num(5))
    assert not any(holds(narrow, wide) for wide in FLOATS)
