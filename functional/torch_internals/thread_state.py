"""torch's thread-local state: cleared for a trace, and restored whatever happens inside.

Public contexts set single parts of it; none reads all of it, or restores it after an error.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._C import _functorch as functorch_c
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    _pop_mode as _pop_dispatch_mode,
)

from torchard.functional.torch_internals import functorch_levels
from torchard.functional.torch_internals.accessors.required import require
from torchard.functional.torch_internals.modes import only_default_device
from torchard.functional.torch_internals.told_modes import told_of_the_call

__all__ = ["clean_thread_state"]

require(torch._C, "_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set")
require(torch._C, "_PreserveDispatchKeyGuard", "_set_grad_enabled")
require(torch._C, "_is_fwd_grad_enabled", "_set_fwd_grad_enabled")
require(functorch_c, "get_dynamic_layer_stack_depth", "pop_dynamic_layer_stack_and_undo_to_depth")
require(forward_ad, "_set_fwd_grad_enabled")
require(
    torch._C._autograd,
    *("_saved_tensors_hooks_get_disabled_error_message", "_saved_tensors_hooks_disable"),
    *("_saved_tensors_hooks_enable", "_top_saved_tensors_default_hooks"),
    *("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"),
)

@contextlib.contextmanager
def clean_thread_state(gradients: bool = True) -> Iterator[None]:
    """A context for traces: no functorch level, no mode, gradients on (or off).

    Calls come from inside grad, vmap, other tracers and backward passes, and the trace must not depend on
    that. (`_DisableFuncTorch` only hides the levels and breaks functorch inside.)
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(thread_state_kept())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(only_default_device())
        stack.enter_context(told_of_the_call())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(functorch_levels.nested_forward_ad())
        stack.enter_context(_no_saved_tensor_hooks())
        # Again, inside the contexts above: they must exit from the state in which they were entered.
        stack.enter_context(thread_state_kept())
        yield


@contextlib.contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """Remove saved-tensor hooks around the trace, and allow hooks inside.

    Hooks expect real values (`torch.utils.checkpoint` counts them), and would be given fake ones.
    functorch forbids hooks around a gradient; the trace must not depend on that.
    """
    autograd = torch._C._autograd
    forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if forbidden is not None:
            autograd._saved_tensors_hooks_disable(forbidden)


@contextlib.contextmanager
def thread_state_kept() -> Iterator[None]:
    """Restore torch's state of this thread on exit, whatever is raised inside.

    Some functions of torch change dispatch keys by a guard in a local variable
    (`torch._tensor_str._str`). After an exception the guard lives as long as the traceback, and when it
    is destroyed it sets the keys of the thread to outdated ones: later operations have no autograd, or no
    kernel. So the variables of such frames are cleared here, and the keys are restored after that.
    """
    before = _ThreadState.now()
    try:
        with torch._C._PreserveDispatchKeyGuard():
            try:
                yield
            except BaseException as error:
                clear_frames_of_torch(error)
                raise
            finally:
                before.restore()
    finally:
        changed = before.differences(_ThreadState.now())
    if changed:
        raise RuntimeError(
            f"tracing changed torch's state of this thread ({', '.join(changed)}), and it could not be "
            "restored, so further results of this thread may be wrong. Start a new process."
        )


class _ThreadState(NamedTuple):
    """torch's state of a thread (forward mode: of the process) that a trace must not change."""

    keys: tuple[Any, Any]
    levels: int
    function_modes: list[Any]
    dispatch_modes: list[Any]
    grad: bool
    forward_grad: bool
    inference: bool
    forward: tuple[int, int] | None

    @staticmethod
    def now() -> _ThreadState:
        c = torch._C
        forward = None
        if functorch_levels.is_only_thread():
            forward = forward_ad._current_level, eager_transforms.JVP_NESTING
        return _ThreadState(
            (c._dispatch_tls_local_include_set(), c._dispatch_tls_local_exclude_set()),
            functorch_c.get_dynamic_layer_stack_depth(),
            _get_current_function_mode_stack(),
            _get_current_dispatch_mode_stack(),
            torch.is_grad_enabled(),
            c._is_fwd_grad_enabled(),
            torch.is_inference_mode_enabled(),
            forward,
        )

    def restore(self) -> None:
        """Exit levels and modes that were left open, innermost first."""
        if functorch_c.get_dynamic_layer_stack_depth() > self.levels:
            functorch_c.pop_dynamic_layer_stack_and_undo_to_depth(self.levels)
        for _ in range(torch._C._len_torch_function_stack() - len(self.function_modes)):
            _pop_mode()
        for _ in range(torch._C._len_torch_dispatch_stack() - len(self.dispatch_modes)):
            _pop_dispatch_mode()
        if self.forward is not None and functorch_levels.is_only_thread():
            level, eager_transforms.JVP_NESTING = self.forward
            while forward_ad._current_level > level:
                forward_ad.exit_dual_level()
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)

    def differences(self, other: _ThreadState) -> list[str]:
        """The names of the fields that differ from another state."""
        if self.forward is None or other.forward is None:
            self, other = self._replace(forward=None), other._replace(forward=None)
        pairs = zip(self._fields, map(_comparable, self), map(_comparable, other), strict=True)
        return [name for name, mine, others in pairs if mine != others]


def _comparable(value: Any) -> Any:
    """A comparable form of a field: dispatch keys by their text, modes by identity."""
    if isinstance(value, tuple):
        return [str(keys) for keys in value]
    return list(map(id, value)) if isinstance(value, list) else value


_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def clear_frames_of_torch(error: BaseException) -> None:
    """Clear the variables of torch's frames in the tracebacks of an error and of its causes.

    Frames of the user's keep theirs, for debuggers.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        error_or_none = errors.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        errors += [error_or_none.__cause__, error_or_none.__context__]
        for frame, _ in traceback.walk_tb(error_or_none.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
