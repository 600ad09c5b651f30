"""Notes on errors in a user's function: the line, the torch call, and its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchard.functional.core import user_lines as source

__all__ = ["note_call", "note_line", "note_operands"]

_MARK = "raised at "
# The most characters shown of an argument that is not a tensor.
_LONGEST = 60


def note_call(
    error: Exception, line: str | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Note that a torch call at this line of the user's code raised an error, if nothing is noted yet.

    If a backward pass fails, the call of ``torch.autograd.grad`` would not identify the operation.
    """
    by = "" if func is torch.autograd.grad else f", by {_call_text(func, args, kwargs)}"
    return _note(error, line, by)


def note_operands(error: Exception, scope: str, named: Mapping[str, torch.Tensor]) -> None:
    """Note the scope in which a call raised an error, and which of its tensors have names."""
    texts = [f"{path} is {_text(tensor)}" for path, tensor in named.items()]
    parts = [f"in {scope}"] * bool(scope) + [" and ".join(texts)] * bool(texts)
    if parts:
        error.add_note(", where ".join(parts))


def note_line(error: Exception) -> None:
    """Note the user's line that raised an error; see `note_call`, whose note is not replaced."""
    _note(error, source.of_error(error), "")


def _note(error: Exception, line: str | None, by: str) -> bool:
    noted = any(note.startswith(_MARK) for note in getattr(error, "__notes__", ()))
    if line is None or noted or line in str(error):
        return False
    error.add_note(f"{_MARK}{line}{by}")
    return True


def _call_text(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call with the dtypes and shapes of its tensors: ``matmul(float32[4, 6], float32[4, 6])``."""
    name = getattr(func, "__name__", repr(func)).removeprefix("__").removesuffix("__")
    texts = [_text(arg) for arg in args] + [f"{key}={_text(arg)}" for key, arg in kwargs.items()]
    return f"{name}({', '.join(texts)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    try:
        text = repr(value)
    except Exception:  # the object may be half built; the call's error matters, not this one
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
