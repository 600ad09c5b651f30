"""The answers to mode queries by the user's code during a trace: those of the plain call.

`torch.compiler.is_compiling` and `torch.is_inference_mode_enabled` are functions that no mode sees, and
that torch offers no way to answer. A trace runs without inference mode and sets the compiling flag, so
that torch and installed packages take branches that do not read values; in the call, both may differ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchard.functional.core.locks import Lock
from torchard.functional.core.user_lines import asked_by_user
from torchard.functional.torch_internals.accessors.required import require

__all__ = ["in_inference_mode", "inference_mode_told"]

require(torch.compiler, "_is_compiling_flag")

# The compiling flag is process-wide, so two traces at once must not restore each other's value; and
# torch's compilers are not re-entrant.
one_at_a_time = Lock()


class _Call(NamedTuple):
    """The modes of a call that is traced."""

    compiling: bool
    inference: bool


# The calls of the trace in progress and of the traces around it; the thread that traces holds the lock.
_calls: list[_Call] = []
_real_inference = torch.is_inference_mode_enabled
_real_code = torch.compiler.is_compiling.__code__
# Torch functions that query the mode for other functions.
_BETWEEN = (
    os.path.join("torch_internals", os.path.basename(__file__)),
    *(os.path.join("torch", *path) for path in (("_utils.py",), ("compiler", "__init__.py"))),
    os.path.join("torch", "_dynamo", "external_utils.py"),
)


def _after_fork() -> None:
    """In the child of a fork: no trace is in progress, unless a trace forked it."""
    if not one_at_a_time.is_held():
        _end()


os.register_at_fork(after_in_child=_after_fork)


def _end() -> None:
    if _calls:
        torch.compiler._is_compiling_flag = _calls[0].compiling
    _calls.clear()
    torch.compiler.is_compiling.__code__ = _real_code
    torch.is_inference_mode_enabled = _real_inference


@contextlib.contextmanager
def told_of_the_call() -> Iterator[None]:
    """Set the compiling flag, as torch.export does, and answer the user's code as the call would."""
    with one_at_a_time:
        compiling = _calls[-1].compiling if _calls else torch.compiler._is_compiling_flag
        _calls.append(_Call(compiling, in_inference_mode()))
        torch.compiler._is_compiling_flag = True
        # Its code, since callers may have imported the function itself, and guards know it.
        torch.compiler.is_compiling.__code__ = _told_compiling.__code__
        torch.is_inference_mode_enabled = inference_mode_told
        try:
            yield
        finally:
            _calls.pop()
            if not _calls:
                torch.compiler._is_compiling_flag = compiling
                torch.compiler.is_compiling.__code__ = _real_code
                torch.is_inference_mode_enabled = _real_inference


def _told_compiling() -> bool:
    from torchard.functional.torch_internals.told_modes import compiling_told

    return compiling_told()


def compiling_told() -> bool:
    """The result of `torch.compiler.is_compiling` during a trace: True for installed packages."""
    if not _calls:
        return torch.compiler._is_compiling_flag
    if not one_at_a_time.is_held() or asked_by_user(*_BETWEEN, installed=False):
        return _calls[-1].compiling
    return True


def inference_mode_told() -> bool:
    """What `torch.is_inference_mode_enabled` returns during a trace: to torch, what is so in it."""
    return in_inference_mode() if asked_by_user(*_BETWEEN) else _real_inference()


def in_inference_mode() -> bool:
    """Whether torch's inference mode is on, or is around the call that is traced."""
    traced = bool(_calls) and one_at_a_time.is_held()
    return _real_inference() or (traced and _calls[-1].inference)
