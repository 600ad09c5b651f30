"""torch's modes, autocast and excluded dispatch keys.

Modes can be entered publicly, but no public interface lists the active ones or disables them for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "TorchDispatchMode",
    "Watching",
    "autocast_off",
    "autocast_on",
    "default_device",
    "dispatch_is_excluded",
    "function_modes",
    "has_modes",
    "no_function_modes",
    "no_modes",
]

require(torch._C, "_len_torch_function_stack", "_len_torch_dispatch_stack", "DisableTorchFunction")
require(torch._C, "_dispatch_tls_is_dispatch_key_excluded", "DispatchKey")
require(torch._C.DispatchKey, "Python")
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


class Watching(TorchDispatchMode):
    """A mode that is told of operators and their operands, and changes nothing.

    Programs run under it as they do without: it counts as no mode.
    """

    def __init__(self, seen: Callable[[Any, Sequence[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = tree_leaves((args, kwargs))
        self.seen(func, [value for value in values if isinstance(value, torch.Tensor)])
        return func(*args, **(kwargs or {}))


def has_modes() -> bool:
    """Whether a dispatch mode (a tracer, a fake mode) is active."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(not isinstance(mode, Watching) for mode in _get_current_dispatch_mode_stack())


def dispatch_is_excluded() -> bool:
    """Whether torch is running Python code where operations cannot be traced, as `torch.tensor` does.

    It reads the items of sequences with the Python key excluded: operations on fake tensors there run
    real kernels on uninitialised memory.
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return excluded


def autocast_on() -> bool:
    """Whether autocast is enabled for any device."""
    return torch._C._is_any_autocast_enabled()


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """A context without autocast: a traced program has explicit casts."""
    with torch._C._DisableAutocast():
        yield
