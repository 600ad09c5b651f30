"""Source lines of the user: frames of torch and of this library are skipped."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import optree
import torch

__all__ = [
    "asked_by_user",
    "begins_here",
    "calls_after_user",
    "files_of",
    "is_installed",
    "is_installed_module",
    "is_user",
    "of_code",
    "of_error",
    "of_here",
]


def _library_folders() -> tuple[str, ...]:
    functional = Path(os.path.abspath(__file__)).parent.parent
    sources = [
        os.path.join(root.parent, package)
        for root in (functional, functional.resolve())
        for package in ("functional", "sharding", "kernels", "testing")
    ]
    packages = [os.path.abspath(path) for module in (torch, optree) for path in module.__path__]
    return tuple(folder + os.sep for folder in sources + packages)


_FOLDERS = _library_folders()
# Code typed at a prompt has no file: Python's (numbered from 3.13 on), IPython's, doctest's.
_TYPED = ("<stdin", "<python-input", "<ipython", "<string", "<doctest")
_PATHS = {key: os.path.abspath(path) + os.sep for key, path in sysconfig.get_paths().items()}
_STANDARD = (_PATHS["stdlib"], _PATHS["platstdlib"])
_PACKAGES = (_PATHS["purelib"], _PATHS["platlib"])
# Runners of tests, whose frames are between a test and the functions that it calls.
_RUNNERS = tuple(os.path.join(p, name) + os.sep for p in _PACKAGES for name in ("hypothesis", "_pytest"))
# By file: code objects hash all that they hold, each time.
_is_user: dict[str, bool] = {}


def is_user(code: CodeType) -> bool:
    """Whether code is neither Python's, nor torch's, nor this library's, nor generated."""
    name = code.co_filename
    known = _is_user.get(name)
    if known is None:
        generated = name.startswith("<") and not name.startswith(_TYPED)
        path = os.path.abspath(name)
        known = not (generated or path.startswith(_FOLDERS + _RUNNERS) or _is_standard(path))
        _is_user[name] = known
    return known


def _is_standard(path: str) -> bool:
    """Whether a file is in the standard library, whose folder may have that of packages in it."""
    return path.startswith(_STANDARD) and f"-packages{os.sep}" not in path


def is_installed(code: CodeType) -> bool:
    """Whether code is in the standard library or an installed package, which users do not edit."""
    return os.path.abspath(code.co_filename).startswith(_STANDARD + _PACKAGES)


def is_installed_module(module: ModuleType) -> bool:
    """Whether a module is installed. A module without a file is builtin, except the main module."""
    path = vars(module).get("__file__")
    if module.__name__.partition(".")[0] in ("torch", "torchard"):
        return True
    if path is None:
        return module.__name__ in sys.builtin_module_names
    return bool(os.path.abspath(path).startswith(_STANDARD + _PACKAGES))


def _written(code: CodeType, line: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"


def of_code(code: CodeType) -> str:
    """The line at which a function is written."""
    return _written(code, code.co_firstlineno)


def of_here() -> str | None:
    """The innermost line of the user's code on this thread's stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user(frame.f_code):
            return _written(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def begins_here() -> str:
    """`of_here` as the beginning of a message, ``model.py:3 in forward: ``; empty if there is none."""
    line = of_here()
    return "" if line is None else f"{line}: "


def asked_by_user(*between: str, installed: bool = True) -> bool:
    """Whether the user's code called this function's caller, ignoring frames of files between them.

    Args:
        between: the endings of the names of these files.
        installed: whether code of installed packages is the user's, too.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(between):
        frame = frame.f_back
    if frame is None or not is_user(frame.f_code):
        return False
    return installed or not is_installed(frame.f_code)


def of_error(error: BaseException) -> str | None:
    """The innermost line of the user's code in an error's traceback; None if there is none."""
    line_text = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user(frame.f_code):
            line_text = _written(frame.f_code, line)
    return line_text


def files_of(error: BaseException) -> str:
    """The module of an error's class and the files in its traceback, as one text."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return " ".join((type(error).__module__, *files))


def calls_after_user(error: BaseException, name: str) -> bool:
    """Whether the innermost line of the user's code called a function of this name, which raised."""
    called = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        called = not is_user(frame.f_code) and (called or frame.f_code.co_name == name)
    return called
