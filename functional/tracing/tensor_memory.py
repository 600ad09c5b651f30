"""Operations that read memory: copies, pickles, pointers, Python loops. Traced values have no memory."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.tracing.autograd_state import copies_apart
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["is_deep_copy"]

# The key, in deepcopy's memo of objects by id, of the storages that one call has copied.
_COPIED = "torchard: storages"
_Refusal = tuple[str, str]  # the action of the user's line, and the remedy
_REFUSED: dict[Any, _Refusal] = {
    torch.Tensor.__reduce_ex__: ("copies or pickles", "x.detach() is another tensor with its memory"),
    torch.Tensor.__dlpack__: ("exports", "Pass the tensor itself, or export it outside of the transform"),
    torch.Tensor.data_ptr: ("reads the address of", "Compare tensors by `is`"),
}
_BY_PYTHON = ("runs a Python function on each element of", "Use operations of torch, or torch.where")
_REFUSED |= dict.fromkeys((torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_), _BY_PYTHON)
_REFUSED[torch.Tensor.share_memory_] = ("shares", "Share the tensor that the function returns")
_NO_LEAF = ("makes a deep copy of", "x.clone() is a copy that gradients pass through")
_VIEWS = ("makes one deep copy of several views of", "Copy them one by one by x.clone()")


def is_deep_copy(state: TraceState, func: Any, args: Any) -> bool:
    """Whether a torch function is a deep copy of a value, which may be recorded as a clone.

    Raises:
        PurityError: torch refuses the copy, or the function reads memory in other ways; names the line.
    """
    if func in _REFUSED:
        raise _refusal(*_REFUSED[func])
    if func is not torch.Tensor.__deepcopy__:
        return False
    tensor, memo = args
    if not copies_apart(state, tensor):
        raise _refusal(*_NO_LEAF)
    copied = memo.setdefault(_COPIED, {})
    storage = internals.storage_id(internals.base_tensor(tensor))
    if copied.setdefault(storage, id(tensor)) != id(tensor):
        raise _refusal(*_VIEWS)
    return True


def _refusal(does: str, remedy: str) -> PurityError:
    where = source.of_here() or "a line that could not be found"
    return PurityError(f"{where} {does} a value of a traced function, which has no memory yet. {remedy}.")
