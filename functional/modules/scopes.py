"""A module's forward in the module's scope, so that traces, plans and messages name it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.core.wrapper import ModuleCopy, Wrapper
from torchard.functional.effects.batch_norm_modules import traceable_forward
from torchard.functional.modules.checks import check_attributes
from torchard.functional.programs.tags import NAME, SCOPE
from torchard.functional.tracing.stand_ins import any_stand_in
from torchard.functional.tracing.trace_state import TraceState, active, in_frames

__all__ = ["called_at", "iterate", "name_held", "scope"]


def name_held(path: str, part: nn.Module) -> None:
    """Tell the functions made of modules that a part holds their paths, for scopes."""
    for key, value in vars(part).items():
        for name, held in _functions_in(value, f"{path}.{key}".lstrip(".")):
            held.hold_at(name)


def _functions_in(value: Any, name: str) -> Iterator[tuple[str, ModuleCopy]]:
    if isinstance(value, Wrapper):
        value = value.fn
    if isinstance(value, ModuleCopy):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _functions_in(item, f"{name}.{i}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _functions_in(item, f"{name}.{key}")


@contextlib.contextmanager
def called_at(path: str) -> Iterator[None]:
    """A context for the call of a function made of a module, inside of another one or of scopes."""
    state = active()
    if state is None or not (path or state.frames):
        yield
        return
    with in_frames((*state.frames, Frame(path, module=bool(path), root=True))):
        yield


def iterate(path: str, part: nn.Module) -> None:
    """Give a part of stacked layers the forward of all layers."""
    scoped: Any = part.forward  # by the path of the first layer
    scope(path, Frame(path, module=True, iterated=True), part, scoped.replaced)


def scope(path: str, frame: Frame, module: nn.Module, own: Callable[..., Any] | None) -> None:
    """Run a module's forward in the module's scope, with labels on its first tensor argument and result.

    Copies of the module that a forward makes have the forward that the module had.

    Args:
        own: the module's own forward, in place of its class's, which may be replaced later.
    """
    named = any(True for _ in module.parameters())

    @functools.wraps(own or traceable_forward(module))
    def run(*args: Any, **kwargs: Any) -> Any:
        part = internals.called_module(run, module)
        before = dict(vars(part))
        out = within(own or traceable_forward(part), args, kwargs)
        check_attributes(path or type(part).__name__, before, vars(part))
        return out

    def within(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        state = active()
        if state is None or not path:
            return forward(*args, **kwargs)
        with in_frames((*state.frames, replace(frame))):  # each entry is a frame of its own
            if named:
                args, kwargs = _named_argument(state, args, kwargs)
            out = forward(*args, **kwargs)
            return _named_result(state, out) if named else out

    run.replaced = own  # type: ignore[attr-defined]  # for `iterate`
    module.forward = run
    # What `copy` and pickle ask an object for; they do not copy functions.
    vars(module)["__getstate__"] = functools.partial(_state_of, module, own)
    vars(module)["_apply"] = functools.partial(_converted, module)


def _state_of(part: nn.Module, own: Any) -> dict[str, Any]:
    """What a copy of a part has: its attributes, without those that `functionalize` gave it."""
    state = dict(type(part).__getstate__(part))
    state = {key: value for key, value in state.items() if key not in _ADDED}
    return state if own is None else {**state, "forward": own}


_ADDED = ("forward", "__getstate__", "_apply")


def _converted(part: nn.Module, convert: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    """Implements ``part.to(...)``, ``part.double()`` and others, which convert tensors in place.

    Raises:
        PurityError: in a call, whose tensors the conversion would replace.
    """
    if not any_stand_in():
        return internals.converted(part, convert, *args, **kwargs)
    if all(convert(tensor) is tensor for tensor in (*part.parameters(), *part.buffers())):
        return part
    raise PurityError(
        f"{source.of_here()} converts a {type(part).__name__} in place (by to(), double(), half() or "
        "the like), which would replace the parameters of the call. Convert tensors where they are "
        "used, as in F.linear(x, part.weight.double()), or convert the module before functionalize."
    )


def _named_argument(
    state: TraceState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            # The label goes on a view, so that other readers of the value do not have it.
            return (*args[:i], _labelled(state, value.view_as(value), "in"), *args[i + 1 :]), kwargs
    for k, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, k: _labelled(state, value.view_as(value), "in")}
    return args, kwargs


def _labelled(state: TraceState, value: Tensor, label: str) -> Tensor:
    state.label(value, label)
    return value


def _named_result(state: TraceState, out: Any) -> Any:
    if isinstance(out, Tensor):
        return _labelled(state, out if _is_own(state, out) else out.view_as(out), "out")
    if type(out) in (tuple, list) and out and isinstance(out[0], Tensor):
        return type(out)((_named_result(state, out[0]), *out[1:]))
    return out


def _is_own(state: TraceState, value: Tensor) -> bool:
    """Whether the innermost module itself computed the value, and it has no label yet."""
    node = internals.proxy_node(state.tracer, internals.base_tensor(value))
    if node is None or node.op != "call_function":
        return False
    return SCOPE.get(node) == path_of(state.frames) and not NAME.on(node)
