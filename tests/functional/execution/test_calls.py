"""What generated code calls for an operator: torch's functions, which call that operator and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples import SAMPLES
from pointwise_samples import pointwise_samples
from same_bits import assert_same_bits

from torchard import jit
from torchard.functional import torch_internals as internals
from torchard.functional.programs.calls import FUNCTIONS, callee
from torchard.functional.torch_internals.operators import aten

# torch's functions call the operator of tensors, with a number for the tensor, as these operators do.
OF_NUMBERS = (aten.div.Scalar, aten.mul.Scalar)


class Called(internals.TorchDispatchMode):
    """The operators that are called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = [_kind(x) for x in (*args, *(kwargs or {}).values())]
        self.calls.append((op, described))
        return op(*args, **(kwargs or {}))


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.stride()
    return [_kind(each) for each in x] if isinstance(x, (list, tuple)) else x


def called(fn: Any, sample: Any) -> tuple[list[Any], Any]:
    with torch.no_grad(), Called() as mode:
        result = fn(*sample.args, **sample.kwargs)
    return mode.calls, result


@pytest.mark.parametrize("op", FUNCTIONS, ids=str)
def test_a_function_calls_the_operator(op: Any) -> None:
    assert callee(op) is FUNCTIONS[op]
    for sample in SAMPLES.get(op) or pointwise_samples(op):
        try:
            want, expected = called(op, sample)
        except (RuntimeError, NotImplementedError):  # of other dtypes
            continue
        have, result = called(FUNCTIONS[op], sample)
        if op not in OF_NUMBERS:
            assert have == want
        assert_same_bits(result, expected)


def test_other_dtypes_promote_alike() -> None:
    halves = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    for dtype in (torch.int32, torch.bool, torch.float16, torch.complex64):
        x = torch.tensor([1, 0]).to(dtype)
        for name in ("add", "mul", "maximum", "eq", "div", "where"):
            for op in (op for op in FUNCTIONS if op._schema.name == f"aten::{name}"):
                for other in (halves, 2, 0.5, x):
                    args = (x.bool(), x, halves) if name == "where" else (x, other)
                    try:
                        want = op(*args)
                    except (RuntimeError, TypeError, NotImplementedError):
                        continue
                    assert_same_bits(FUNCTIONS[op](*args), want)


def test_a_default_device_changes_nothing() -> None:
    """It is for tensors that a function makes while it is traced, not for what runs later."""
    run = jit(lambda x: (x + 1).cumsum(0) * 2, backend="eager")
    x = torch.ones(3)
    want = run(x)
    with torch.device("cpu"):
        assert torch.equal(run(x), want)
