"""What generated code calls for an operator: it, or another that does the same, and safely.

In gloo's process groups two threads run collectives, and note the name of each that is done in one
string of the group, without a lock (torch 2.13, `ProcessGroupGloo::runLoop`). More than 15 characters of
a string are on the heap: threads that replace them at a time free them twice, or write to what has been
freed, and the process dies later, in any allocation. Of the functional collectives that are called with
tensors on a CPU, `all_gather_into_tensor` alone has such a name (ALLGATHER_COALESCED);
`all_gather_into_tensor_out` has not, and does without two copies of what is gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.torch_internals.operators import c10d

__all__ = ["callee"]

_GATHER = c10d.all_gather_into_tensor.default
_gather_into: Any = internals.direct(c10d.all_gather_into_tensor_out.default)


def callee(target: Any) -> Any:
    """The function that generated code calls for the target of a node."""
    return _gathered if target is _GATHER else internals.direct(target)


def _gathered(x: torch.Tensor, ranks: int, group: str) -> Any:
    """Issue a gather into new memory; for tracers and modes it stays one functional operation."""
    if not _runs_at_once(x):
        return _GATHER(x, ranks, group)
    shape = (ranks * x.shape[0], *x.shape[1:]) if x.ndim else (ranks,)
    return _gather_into(x, ranks, group, out=x.new_empty(shape))


def _runs_at_once(x: torch.Tensor) -> bool:
    """Whether this is a tensor in memory of a CPU, and nothing looks at how it is gathered."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cpu
        and not x.is_complex()
        and not (x.requires_grad and torch.is_grad_enabled())
        and not internals.has_modes()
        and not internals.is_wrapped(x)
    )
