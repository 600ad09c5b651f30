"""Values of a trace in ``copy`` and ``pickle``: what makes objects from memory has no memory here."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.tracing.autograd_state import copies_apart
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["check_copies"]

# The place of the storages that one call of deepcopy has copied, in its memo of objects by their ids.
_COPIED = "torchard: storages"


def check_copies(state: TraceState, func: Any, args: Any) -> bool:
    """Whether a function of torch is a deep copy of a value, which may be recorded as a clone.

    Raises:
        PurityError: it is another copy of the object, or one that torch refuses; names the line.
    """
    if func is torch.Tensor.__reduce_ex__:
        raise _refusal("copies or pickles", "x.detach() is another tensor with the same memory")
    if func is not torch.Tensor.__deepcopy__:
        return False
    tensor, memo = args
    if not copies_apart(state, tensor):
        raise _refusal("makes a deep copy of", "x.clone() is a copy that gradients pass through")
    copied = memo.setdefault(_COPIED, {})
    storage = internals.storage_id(internals.base_tensor(tensor))
    if copied.setdefault(storage, id(tensor)) != id(tensor):
        raise _refusal(
            "makes one deep copy of several views of", "Copy them one by one by x.clone()"
        )
    return True


def _refusal(does: str, remedy: str) -> PurityError:
    where = source.of_here() or "a line that could not be found"
    return PurityError(
        f"{where} {does} a value of a traced function, which has no memory yet. {remedy}."
    )
