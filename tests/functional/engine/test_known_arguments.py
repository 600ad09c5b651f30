"""Arguments that torch's compiled check finds to be like those of the last call have the same key."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from torchard import jit
from torchard.functional.tracing.signature import Known, read

X = torch.arange(6.0).view(2, 3)
# No two of them may share a trace.
DIFFERENT: dict[str, Any] = {
    "tensor": X,
    "dtype": X.double(),
    "shape": X[:, :2].clone(),
    "strides": X.T.contiguous().T,
    "rank": X.flatten(),
    "number": 2.0,
    "integer": 2,
    "nothing": None,
    "list": [X],
    "scalar": torch.tensor(1.0),
    "complex": X + 0j,
}


@pytest.mark.parametrize("first", DIFFERENT)
def test_other_arguments_have_other_keys(first: str) -> None:
    known = Known.of(read((DIFFERENT[first], X.clone()), {}))
    for second, value in DIFFERENT.items():
        given = (value, X.clone()), {}
        found = read(*given, known).key
        assert found == read(*given).key
        assert (found == read((DIFFERENT[first], X.clone()), {}).key) is (first == second)


def test_settings_are_part_of_what_is_compared() -> None:
    known = Known.of(read((X,), {}))
    assert known is not None and known.fits(*_flat(X))
    with torch.autocast("cpu", torch.bfloat16):
        assert read((X,), {}, known).key != known.key
    torch.set_default_dtype(torch.float64)
    try:
        assert not known.fits(*_flat(X))
    finally:
        torch.set_default_dtype(torch.float32)


def test_transforms_and_lazy_values_are_read_one_by_one() -> None:
    known = Known.of(read((X,), {}))
    assert known is not None
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(known.fits(*_flat(x)))
        return x.sum()

    torch.func.grad(f)(X)
    torch.func.vmap(f)(torch.stack([X, X]))
    assert seen == [False, False]
    conjugate = Known.of(read((X + 0j,), {}))
    assert conjugate is not None and not conjugate.fits(*_flat((X + 0j).conj()))


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
def test_calls_of_changing_arguments() -> None:
    f = jit(lambda x, y: x * 2 + y.sum(), backend="eager")
    tensors = [v for v in DIFFERENT.values() if isinstance(v, torch.Tensor)]
    for x, y in itertools.product(tensors, tensors):
        for _ in range(2):
            torch.testing.assert_close(f(x, y), x * 2 + y.sum())


def test_no_tensor_is_held() -> None:
    x = torch.ones(3)
    known = Known.of(read((x,), {}))
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert known is not None and alive() is None


def _flat(*args: Any) -> Any:
    arguments = read(args, {})
    return arguments.structure, arguments.leaves
