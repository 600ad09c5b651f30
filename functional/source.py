"""Which line of the user's made this: frames of torch and of this library are skipped."""

from __future__ import annotations

import os
import sys
import traceback
from types import CodeType, FrameType

import optree
import torch

__all__ = ["is_user", "of_error", "of_here"]


def _library_folders() -> tuple[str, ...]:
    here = os.path.dirname(os.path.abspath(__file__))
    rooms = [
        os.path.join(os.path.dirname(root), room)
        for root in (here, os.path.realpath(here))
        for room in ("functional", "sharding", "kernels")
    ]
    packages = [os.path.abspath(path) for module in (torch, optree) for path in module.__path__]
    return tuple(folder + os.sep for folder in rooms + packages)


_FOLDERS = _library_folders()
_is_user: dict[CodeType, bool] = {}


def is_user(code: CodeType) -> bool:
    """Whether code is neither torch's, this library's nor generated."""
    known = _is_user.get(code)
    if known is None:
        name = code.co_filename
        generated = name.startswith("<") and not name.startswith(("<stdin", "<ipython", "<string"))
        standard = os.sep + "contextlib.py" in name or os.sep + "functools.py" in name
        known = not (generated or standard or os.path.abspath(name).startswith(_FOLDERS))
        _is_user[code] = known
    return known


def _written(code: CodeType, line: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"


def of_here() -> str | None:
    """The innermost line of the user's on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user(frame.f_code):
            return _written(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def of_error(error: BaseException) -> str | None:
    """The innermost line of the user's that this error passed through."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user(frame.f_code):
            found = _written(frame.f_code, line)
    return found
