"""Tensors: dims by name, every special value and layout drawn, and small ones in the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from effort import cases, examples
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from same_bits import assert_same_memory

from torchard.testing.strategies import tensors
from torchard.testing.strategies.elements import KINDS
from torchard.testing.strategies.layouts import LAYOUTS
from torchard.testing.strategies.source import tensor_source

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [
    *FLOATS,
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
Tensors = tuple[torch.Tensor, ...]
MANY = settings(max_examples=5000, database=None)


@given(tensors("b s (h d), 3 d, ... h, b s:int64,", dtype=FLOATS, max_size=4))
def test_dims_of_one_name_have_one_size(drawn: Tensors) -> None:
    x, w, more, ids, scalar = drawn
    heads, size = more.shape[-1], w.shape[1]
    assert x.shape[2] == heads * size and w.shape[0] == 3
    assert x.shape[:2] == ids.shape
    assert 1 <= more.ndim <= 3 and not scalar.ndim
    assert ids.dtype == torch.int64
    assert x.dtype == w.dtype == more.dtype == scalar.dtype in FLOATS
    assert all(1 <= n <= 4 for n in (*x.shape[:2], heads, size))


@given(tensors("b ... d, ... d", min_size=0))
def test_an_ellipsis_is_the_same_everywhere(drawn: Tensors) -> None:
    assert drawn[0].shape[1:] == drawn[1].shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(ci=25, explore=2000))
@given(data=st.data())
def test_the_printed_text_gives_the_same_tensor(dtype: torch.dtype, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    (x,) = data.draw(tensors("...", dtype=dtype, values=kind, min_size=0))
    assert_same_memory(eval(tensor_source(x), {"torch": torch}), x)


# -- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(ci=15, explore=1000))
@given(data=st.data())
def test_kinds_of_values(dtype: torch.dtype, data: st.DataObject) -> None:
    whole, ordinary, finite = data.draw(
        tensors("n m, n m, n m", dtype=dtype, values=("integers", "ordinary", "finite"))
    )
    parts = torch.view_as_real(whole) if dtype.is_complex else whole
    assert set(parts.flatten().tolist()) <= set(range(-4, 5))
    magnitudes = ordinary.abs() if dtype.is_complex else ordinary.double().abs()
    assert bool((magnitudes <= 100).all())
    assert bool(finite.isfinite().all())


@given(tensors("v d, n:int64", values=("ordinary", st.integers(0, 2)), min_size=3))
def test_a_strategy_of_numbers(drawn: Tensors) -> None:
    table, ids = drawn
    assert table[ids].shape == (len(ids), table.shape[1])


def _subnormal(x: torch.Tensor) -> torch.Tensor:
    return (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)


SPECIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": torch.isnan,
    "infinity": lambda x: x == math.inf,
    "minus infinity": lambda x: x == -math.inf,
    "minus zero": lambda x: (x == 0) & x.signbit(),
    "subnormal": _subnormal,
    "the largest": lambda x: x == torch.finfo(x.dtype).max,
    "next to one": lambda x: x == 1 + torch.finfo(x.dtype).eps,
    "large": lambda x: x.isfinite() & (x.abs() > 1000),
    "small": lambda x: (x != 0) & (x.abs() < 1e-3),
    "between integers": lambda x: x.isfinite() & (x != x.round()) & (x.abs() < 10),
}


# Each dtype twice or three times; all pairs in `make explore`.
PAIRS = [(name, dtype) for name in SPECIAL for dtype in FLOATS]
SOME = [(name, FLOATS[i % len(FLOATS)]) for i, name in enumerate(SPECIAL)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "dtype"), cases(SOME, [pair for pair in PAIRS if pair not in SOME]), ids=str
)
def test_the_smallest_tensor_with_a_special_value(name: str, dtype: torch.dtype) -> None:
    strategy = tensors("b d, d", dtype=dtype, values="all")
    x, other = find(strategy, lambda xs: bool(SPECIAL[name](xs[0]).any()), settings=MANY)
    assert x.shape == (1, 1) and x.is_contiguous() and not x.storage_offset()
    assert other.shape == (1,) and other.item() == 0


def test_the_smallest_tensor_with_a_tie() -> None:
    def tied(xs: Tensors) -> bool:
        return bool((xs[0] == xs[0].max()).sum() > 1) and bool(xs[0].max() > 4)

    (x,) = find(tensors("n"), tied, settings=MANY)
    assert x.tolist() == [5.0, 5.0]


# -- layouts ------------------------------------------------------------------------------------------

SHOWS: dict[str, Callable[[torch.Tensor], bool]] = {
    "transposed": lambda x: not x.is_contiguous() and x.mT.is_contiguous(),
    "offset": lambda x: x.is_contiguous() and x.storage_offset() > 0,
    "sliced": lambda x: min(x.stride()) > 1,
    "expanded": lambda x: x.shape[1] > 1 and x.stride(1) == 0,
}
SIZES = {"transposed": [2, 2], "offset": [1, 1], "sliced": [1, 1], "expanded": [1, 2]}


@pytest.mark.parametrize("layout", SHOWS)
def test_the_smallest_tensor_of_a_layout(layout: str) -> None:
    (x,) = find(tensors("b d"), lambda xs: SHOWS[layout](xs[0]), settings=MANY)
    assert list(x.shape) == SIZES[layout] and not x.any()
    with pytest.raises(NoSuchExample):  # not drawn where it is not asked for
        others = [name for name in LAYOUTS if name not in (layout, "sliced")]
        find(
            tensors("b d", layouts=others),
            lambda xs: SHOWS[layout](xs[0]),
            settings=settings(max_examples=200, database=None),
        )


@given(tensors("n m", layouts=["offset", "sliced"]))
def test_what_lies_between_is_not_a_number(drawn: Tensors) -> None:
    (x,) = drawn
    storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    assert int(storage.isnan().sum()) == len(storage) - x.numel() > 0
    assert not bool(x.isnan().any())


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ("b d -> b", {}, "no results here"),
        ("b d | whole d", {}, "no clauses here"),
        ("b d:double64", {}, "no dtype 'double64'"),
        ("n=3, n=4", {}, "n is 3 before"),
        ("b (d", {}, "is expected here"),
        ("b, d", {"values": ["all"]}, "names 2 tensors"),
        ("b", {"values": "some"}, "integers, ordinary, finite, all"),
        ("b", {"layouts": ["strided"]}, "contiguous, transposed"),
        ("b", {"layouts": []}, "contiguous, transposed"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    shapes: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tensors(shapes, **options)  # type: ignore[arg-type]
