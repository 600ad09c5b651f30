"""torch's modes, autocast and excluded dispatch keys.

Modes can be entered publicly, but no public interface lists the active ones or disables them for a while.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import (
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    handle_torch_function,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "TorchDispatchMode",
    "autocast_off",
    "autocast_on",
    "default_device",
    "dispatch_is_excluded",
    "function_modes",
    "has_modes",
    "no_function_modes",
    "no_modes",
    "records_operations",
    "unpatched",
]

require(torch._C, "_len_torch_function_stack", "_len_torch_dispatch_stack", "DisableTorchFunction")
require(torch._C, "_dispatch_tls_is_dispatch_key_excluded", "DispatchKey")
require(torch._C, "_get_dispatch_mode", "_TorchDispatchModeKey")
require(torch._C._TorchDispatchModeKey, "PROXY")
require(torch._C, "_SetExcludeDispatchKeyGuard")
require(torch._C.DispatchKey, "Python", "Conjugate", "Negative", "ZeroTensor")
require(torch._C, "TensorBase")
require(torch._C, "_is_any_autocast_enabled", "_DisableAutocast")


def function_modes() -> list[Any]:
    """The torch function modes of this thread, outermost first."""
    return list(_get_current_function_mode_stack())


def default_device() -> torch.device | None:
    """The device that `torch.device(...)` as a context, or set_default_device, sets; else None."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = _get_current_function_mode_stack()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


@contextlib.contextmanager
def only_default_device() -> Iterator[None]:
    """Pop every TorchFunctionMode except the default device, which affects fn's results."""
    popped = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    devices = [mode for mode in reversed(popped) if isinstance(mode, DeviceContext)]
    for mode in devices:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in devices:
            _pop_mode()
        for mode in reversed(popped):
            _push_mode(mode)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """A context without modes and functorch levels: operations inside are not recorded."""
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """A context to read a tensor's metadata without calling any TorchFunctionMode."""
    with torch._C.DisableTorchFunction():
        yield


def unpatched(func: Any) -> Any:
    """The function of torch that calls the caller's ``__torch_function__`` with func.

    torch passes what it finds under the function's name. If a user has replaced that by a function that
    calls the original, the original's call would be taken for one of the replacement, which would be
    applied twice.
    """
    if type(func) in _OF_C or id(func) in _TORCHS:
        return func
    caller = sys._getframe(2)
    dispatching = caller.f_back if caller.f_code is handle_torch_function.__code__ else None
    if dispatching is not None and getattr(func, "__code__", None) is dispatching.f_code:
        return func
    place = next(((o, k) for o in _OWNERS for k, value in vars(o).items() if value is func), None)
    return func if place is None else _original(*place, dispatching) or func


# Functions of C code: builtin functions, methods, and reads and writes of attributes.
_OF_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_OWNERS: tuple[Any, ...] = (torch.nn.functional, torch.functional, torch.Tensor)


def _original(owner: Any, name: str, dispatching: FrameType | None) -> Any:
    """The function that torch has under a name where a user's is now."""
    known = _NAMED[owner].get(name)
    if known is None and dispatching is None and owner is torch.Tensor:
        return getattr(torch._C.TensorBase, name, None)
    if known is None and dispatching is not None and dispatching.f_code.co_name == name:
        # It was replaced before this module was imported.
        return FunctionType(dispatching.f_code, dispatching.f_globals)
    return known


def _named(owner: Any) -> dict[str, Any]:
    """The functions of torch's in a module or class, by their names."""
    functions = {k: value for k, value in vars(owner).items() if isinstance(value, FunctionType)}
    folder = os.path.dirname(torch.__file__)
    return {k: v for k, v in functions.items() if v.__code__.co_filename.startswith(folder)}


_NAMED = {owner: _named(owner) for owner in _OWNERS}
_TORCHS = {id(function) for named in _NAMED.values() for function in named.values()}


# Dispatch keys that a mode excludes while it handles an operator. The operator's kernel may conjugate and
# multiply; without these keys, the product reads conjugated values as stored in memory (torch 2.13).
def has_modes() -> bool:
    """Whether a dispatch mode (a tracer, a fake mode) is active."""
    return bool(torch._C._len_torch_dispatch_stack())


def records_operations() -> bool:
    """Whether a tracer is active, which needs to see operations that have derivatives."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def dispatch_is_excluded() -> bool:
    """Whether torch is running Python code where operations cannot be traced, as `torch.tensor` does.

    It reads the items of sequences with the Python key excluded: operations on fake tensors there run
    real kernels on uninitialised memory.
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return excluded


# Whether autocast is enabled for any device.
autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """A context without autocast: a traced program has explicit casts."""
    with torch._C._DisableAutocast():
        yield
