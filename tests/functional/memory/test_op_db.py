"""torch's own sample calls in planned memory: the same bits as in allocated memory."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import settings
from op_db import UNDETERMINED, Case, cases, entries, name_of
from torch import Tensor

from torchard import jit
from torchard.functional.memory.planned_code import poisoned

# Every so many entries of the table in a usual run; all of them with --hypothesis-profile=explore.
STEP = 12 if settings.get_current_profile_name() == "ci" else 1
SAMPLES = 4 if STEP > 1 else None
ENTRIES = [entry for entry in entries() if entry.name not in UNDETERMINED][::STEP]


def within(case: Case) -> Any:
    """The call on values of the program, whose results are values of the program too."""

    def f(*inputs: Tensor) -> Any:
        results = case(*[x.clone() for x in inputs])
        return [x.clone() for x in results]

    return f


def wide(x: Tensor) -> Tensor:
    """The same values in a dtype that can be compared."""
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def results_of(fn: Any, inputs: Any) -> Any:
    torch.manual_seed(0)
    return fn(*inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_samples(entry: Any) -> None:
    for case in islice(cases(entry), SAMPLES):
        try:
            want = results_of(jit(within(case), backend="eager"), case.tensors)
        except Exception:  # refused, whatever the memory
            continue
        with poisoned():
            have = results_of(jit(within(case), backend="eager", memory="planned"), case.tensors)
        for a, b in zip(have, want, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.allclose(wide(a), wide(b), rtol=0, atol=0, equal_nan=True), case
