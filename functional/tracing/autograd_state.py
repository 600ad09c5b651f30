"""What a traced function sees of autograd: `requires_grad`, `is_leaf`, `grad_fn`, hooks.

Traced tensors do not have the autograd state of the call's arguments: none requires gradients, except
those that a transform inside the function differentiates. What the user's code would read in the plain
call follows from the arguments that require gradients and from the graph so far: a value requires
gradients if differentiable operations lead to the value from such an argument. If this does not determine
the answer, or if an answer is not enough (a hook also has an effect), the line is refused. Torch's own
code and this library's code see the state of the trace instead.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.effects.mutation import storage_key, written_nodes
from torchard.functional.programs.tags import CUT, VAL
from torchard.functional.tracing.trace_state import TraceState, tracing

__all__ = ["answer", "autograd_of", "copies_apart", "question"]

# Whether a value requires gradients; None if the trace cannot tell.
Verdict = bool | None

_READ = ("requires_grad", "is_leaf", "grad_fn", "grad", internals.VERSION)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
# The files of tensor methods that are written in Python, and of the code from which they call a mode.
_BETWEEN = tuple(os.path.join("torch", name) for name in ("overrides.py", "_tensor.py"))
# Torch functions that skip the user's hooks if a value requires no gradient.
_FOR_HOOKS = (
    (os.path.join("torch", "utils", "hooks.py"), None),
    (os.path.join("torch", "autograd", "graph.py"), None),
    (os.path.join("nn", "modules", "module.py"), "_call_impl"),
)


# -- questions ----------------------------------------------------------------------------------------


def question(func: Any) -> str | None:
    """The name of the autograd state that a torch function reads or changes; None for other functions."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name if name in ("requires_grad_", "is_inference", *_HOOKS) else None
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__set__":
        return "requires_grad_" if attribute == "requires_grad" else None
    return attribute if attribute in _READ else None


def answer(state: TraceState, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The result that func, which reads or changes a tensor's autograd state, has in the plain call.

    Raises:
        PurityError: the trace cannot tell the result; names the line.
    """
    asking = _asking()
    if asking is None or _known_inside(state, args[0]):
        return func(*args, **kwargs)
    node = _node(state, args[0])
    verdict = _required(state, node)
    if asking == "hooks" and verdict is not False:
        raise _refusal("register_hook")
    if name == "requires_grad" and verdict is not None:
        return verdict
    if name == "is_leaf" and verdict is not None:
        return not verdict or (_is_placeholder(node) and _given(state, node).leaf)
    if _is_the_same_here(name, verdict, node) or (name == "requires_grad_" and _turned_on(args, kwargs)):
        return func(*args, **kwargs)
    raise _refusal(name)


def copies_apart(state: TraceState, tensor: torch.Tensor) -> bool:
    """Whether deepcopy copies a value: only leaves, because gradients do not pass through copies."""
    if _known_inside(state, tensor):
        return False
    node = _node(state, tensor)
    return _required(state, node) is False or (_is_placeholder(node) and _given(state, node).leaf)


def _is_the_same_here(name: str, verdict: Verdict, node: fx.Node | None) -> bool:
    """Whether the trace and the plain call have the same answer for a value."""
    if name in (internals.VERSION, "is_inference") or (name == "grad" and _is_placeholder(node)):
        return node is None
    return verdict is False


def _turned_on(args: Any, kwargs: Any) -> bool:
    return bool((*args[1:], *kwargs.values(), True)[0])


def _asking() -> str | None:
    """The reader: the "user"'s code, torch code that skips the user's "hooks", or None for other code."""
    frame = sys._getframe(3)  # the caller of the mode
    while frame.f_back is not None and _is_between(frame.f_code):
        frame = frame.f_back
    code = frame.f_code
    for file, function in _FOR_HOOKS:
        if code.co_filename.endswith(file) and function in (None, code.co_name):
            return "hooks"
    return "user" if source.is_user(code) else None


def _is_between(code: CodeType) -> bool:
    """Whether code only passes a question on: a mode's code, or a tensor method."""
    return code.co_name == "__torch_function__" or code.co_filename.endswith(_BETWEEN)


def _refusal(name: str) -> PurityError:
    where = source.of_here() or "a line that could not be found"
    if name in _HOOKS:
        return PurityError(
            f"{where} sets a hook (by {name}) for a value of a traced function, whose gradient is taken "
            "outside of the trace, where the hook would not run. Write an autograd.Function with a "
            "setup_context whose forward returns its argument and whose backward is the hook, or take "
            "the gradient inside of the function by torch.func.grad."
        )
    return PurityError(
        f"{where} reads or changes the autograd state of a value ({name}) in a traced function, where "
        "it is not known: gradients may be taken around the function. Decide outside of the transform, "
        "and pass the decision as a bool argument, which is static."
    )


# -- answers ------------------------------------------------------------------------------------------


def _known_inside(state: TraceState, tensor: torch.Tensor) -> bool:
    """Whether a level inside the function determines the tensor's state, equally for all calls."""
    with internals.no_function_modes():
        inside = state.given is not None and internals.is_wrapped(tensor)
        return state.native(tensor) and (tensor.requires_grad or inside)


def _node(state: TraceState, tensor: torch.Tensor) -> fx.Node | None:
    base = internals.base_tensor(tensor if state.native(tensor) else state.lift(tensor))
    return internals.proxy_node(state.tracer, base)


def _is_placeholder(node: fx.Node | None) -> bool:
    return node is not None and node.op == "placeholder"


def _required(state: TraceState, wanted: fx.Node | None) -> Verdict:
    """Whether a node's value requires gradients in the call."""
    if wanted is None:
        return False
    state.reads_autograd = True
    if _is_placeholder(wanted):
        return _given(state, wanted).itself
    verdicts: dict[fx.Node, Verdict] = {}
    written: set[int | None] = set()
    for node in state.tracer.graph.nodes:
        inputs = [_after_writes(n, verdicts[n], written) for n in node.all_input_nodes]
        verdicts[node] = _verdict(state, node, inputs)
        if verdicts[node] is not False:
            written |= {storage_key(target) for target in written_nodes(node)}
    return _after_writes(wanted, verdicts[wanted], written)


def _after_writes(node: fx.Node, verdict: Verdict, written: set[int | None]) -> Verdict:
    """A value's verdict; None if values that may require gradients were written to its memory."""
    return None if verdict is False and storage_key(node) in written else verdict


def _verdict(state: TraceState, node: fx.Node, inputs: Sequence[Verdict]) -> Verdict:
    if node.op == "placeholder":
        return _given(state, node).result
    if node.op != "call_function":
        return None
    if not _is_float(VAL.get(node)) or CUT.on(node) or _is_new(node) or set(inputs) <= {False}:
        return False
    if node in state.ungraded:  # recorded inside an autograd.Function, whose result may require gradients
        return None if state.grad_mode else False
    known = node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"
    return True if known and True in inputs and state.grad_mode == state.grad_of_call else None


def _is_float(value: Any) -> bool:
    """Whether a value can require gradients; a tuple of values may."""
    return not isinstance(value, torch.Tensor) or is_inexact(value)


def _is_new(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", ""))
    return name.startswith("new_") or name.partition(".")[0].endswith("_like")


def _given(state: TraceState, node: fx.Node | None) -> _Given:
    """The autograd state of the argument, or of the closed-over tensor, at a placeholder."""
    traces = tracing()
    around = traces[: traces.index(state)]
    closure = next((one for one, _ in state.closures.values() if one.node is node), None)
    if closure is not None:
        found = closure.autograd = _autograd_of(closure.value, around, state.outer_levels)
        return found
    inputs = state.tracer.graph.find_nodes(op="placeholder")
    given = dict(zip(inputs, state.given or (), strict=False))
    return _autograd_of(given.get(node), around, state.outer_levels)


class _Given(NamedTuple):
    """The autograd state of one of the call's values.

    Attributes:
        itself: whether the value requires gradients.
        result: whether results that are computed in the call from this value alone require gradients.
        leaf: whether the value is a leaf.
    """

    itself: Verdict
    result: Verdict
    leaf: bool


_UNKNOWN = _Given(None, None, True)


def autograd_of(value: Any) -> _Given:
    """The autograd state of a value in a call that is made now."""
    return _autograd_of(value, tracing(), internals.level_kinds())


def _autograd_of(value: Any, around: Sequence[TraceState], levels: Sequence[Any]) -> _Given:
    """The autograd state of a value in a call inside these traces and functorch levels."""
    if is_placed(value):
        parts = {_autograd_of(p, around, levels) for p in value.__torchard_placed__().parts}
        return parts.pop() if len(parts) == 1 else _UNKNOWN
    if isinstance(value, float):
        return _Given(False, False, True)
    if not isinstance(value, torch.Tensor):
        return _UNKNOWN
    with internals.no_function_modes():
        base, inside = internals.base_tensor(value), internals.wrapped_in(value)
        place = next((i for i, trace in enumerate(around) if trace.native(base)), -1)
        below = _below(value, base, around, place)
        below = below or any(tensor.requires_grad for tensor in inside)
        itself = value.requires_grad or (not inside and below)
        levels = [level for t in around[place + 1 :] for level in t.outer_levels] + [*levels]
        return _Given(itself, _of_result(itself, below, bool(inside), levels), value.is_leaf)


def _below(value: Any, base: torch.Tensor, around: Sequence[TraceState], place: int) -> Verdict:
    """Whether the tensor inside functorch's wrappers requires gradients (in the trace at ``place``)."""
    if place >= 0:
        return _required(around[place], internals.proxy_node(around[place].tracer, base))
    for trace in around:  # each of these traces depends on the value too
        trace.reads_autograd = True
        _given(trace, internals.proxy_node(trace.tracer, trace.lift(value)))
    return base.requires_grad


def _of_result(itself: Verdict, below: Verdict, wrapped: bool, levels: Sequence[Any]) -> Verdict:
    """Whether results that are computed from a value require gradients inside these levels."""
    if not levels:
        return itself
    if levels == [internals.GRAD]:
        return wrapped and itself
    return False if itself is False and below is False else None
