"""Fusing where dims are of size 0 or 1, or there are none in front: batch 1, one head, one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import NAMES, Case, inputs_of, names_of, outputs, plain
from torch import Tensor
from torch.func import grad, jvp

from torchard import trace
from torchard.kernels import KERNELS, Pattern

SIZES = (0, 1, 2)


def cases(pattern: Pattern) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        st.fixed_dictionaries({n: st.sampled_from(SIZES) for n in names_of(pattern)}),
        st.lists(st.sampled_from(SIZES), max_size=3).map(tuple),
        st.just(torch.float64),
        st.just(("plain",)),
        st.sampled_from(range(100)),
    )


def derivatives(fn: Callable[..., Any], args: Sequence[Tensor]) -> dict[str, Any]:
    """The value of fn and its derivatives, in all modes, with respect to every floating input."""
    floating = [i for i, x in enumerate(args) if x.is_floating_point()]
    moving = tuple(args[i] for i in floating)
    directions = tuple(x.cos() for x in moving)
    every = tuple(range(len(moving)))

    def of_moving(*values: Tensor) -> tuple[Tensor, ...]:
        given_args = list(args)
        for i, value in zip(floating, values, strict=True):
            given_args[i] = value
        return tuple(outputs(fn(*given_args)))

    def loss(*values: Tensor) -> Tensor:
        return sum((out * (out + 1)).sum() for out in of_moving(*values))  # type: ignore[return-value]

    def slope(*values: Tensor) -> Tensor:
        parts = grad(loss, every)(*values)
        return sum((g * d).sum() for g, d in zip(parts, directions, strict=True))  # type: ignore[return-value]

    return {
        "value": outputs(fn(*args)),
        "gradient": grad(loss, every)(*moving),
        "jvp": jvp(of_moving, moving, directions)[1],
        "jvp of the gradient": jvp(lambda *v: grad(loss, every)(*v), moving, directions)[1],
        "gradient of the gradient": grad(slope, every)(*moving),
    }


def tolerance(fn: Callable[..., Any], args: Sequence[Tensor]) -> float:
    """References that compute in float32 whatever they are given are as exact as that."""
    values = [node.meta.get("val") for node in trace(fn)(*args).calls]
    return 1e-5 if any(getattr(v, "dtype", None) == torch.float32 for v in values) else 1e-9


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_dims_of_size_zero_and_one(name: str) -> None:
    @settings(max_examples=examples(ci=2, explore=80), database=None, phases=(Phase.generate,))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        pattern = data.draw(st.sampled_from(KERNELS[name].patterns))
        args = inputs_of(KERNELS[name], pattern, data.draw(cases(pattern)))
        reference = plain(pattern)
        try:
            want = derivatives(reference, args)
        except (RuntimeError, IndexError, ZeroDivisionError):  # no value: the largest of nothing
            return
        close = tolerance(reference, args)
        have = derivatives(fuse(reference, compiler="eager"), args)
        for kind, values in want.items():
            for a, b in zip(have[kind], values, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=close, atol=close, equal_nan=True, msg=lambda m, k=kind: f"{k}: {m}"
                )

    check()
