"""Operators whose results have memory of their own, which programs then write to: observed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from op_db import Case, cases, entries, name_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchard.functional import torch_internals as internals

# Every so many entries of the table in a usual run; all of them with --hypothesis-profile=explore.
STEP = 4 if settings.get_current_profile_name() == "ci" else 1
ENTRIES = list(entries())[::STEP]


class SharedMemory(TorchDispatchMode):
    """Notes operators that were thought to make new memory, and did not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if internals.makes_new_memory(func):
            read = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            made = [_memory(x) for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.nbytes]
            if len(set(made)) < len(made) or not read.isdisjoint(made):
                self.found.add(str(func))
        return results


def _memory(x: torch.Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr() or id(x)
    except (NotImplementedError, RuntimeError):  # sparse: no storage
        return id(x)


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_results_share_no_memory(entry: Any) -> None:
    for case in cases(entry):
        assert not shared_by(case), case


def shared_by(case: Case) -> set[str]:
    with SharedMemory() as mode:
        try:
            case(*[x.clone() for x in case.tensors])
        except Exception:  # refused by torch
            return set()
    return mode.found


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten.unsafe_split.Tensor(x, 2),
        lambda x: torch.ops.aten.unsafe_split_with_sizes.default(x, [1, 3]),
        lambda x: torch.ops.aten._unsafe_view.default(x, [2, 8]),
        lambda x: torch.ops.aten.lift.default(x),
        lambda x: torch.ops.prims.device_put.default(x, torch.device("cpu")),
        lambda x: torch.ops.aten.dropout.default(x, 0.5, False),
        lambda x: torch.ops.aten.native_dropout.default(x, 0.5, False),
        lambda x: torch.ops.aten.sum.dim_IntList(x, []),
        lambda x: torch.ops.aten.constant_pad_nd.default(x, [0, 0]),
        lambda x: torch.ops.aten._to_copy.default(x),
        lambda x: torch.ops.aten.repeat.default(x, [1, 1]),
        lambda x: torch.ops.aten.cat.default([x]),
        lambda x: torch.ops.aten.flip.default(x, []),
        lambda x: torch.ops.aten.roll.default(x, [0]),
    ],
)
def test_calls_that_could_return_their_operand(call: Any) -> None:
    with SharedMemory() as mode:
        call(torch.ones(4, 4))
    assert not mode.found
