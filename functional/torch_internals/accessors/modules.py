"""The tables of an `nn.Module`, autograd's nodes, and the functions of torch.utils.checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils import checkpoint as torchs

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "CHECKPOINT_FUNCTION",
    "CHECKPOINT_FUNCTIONS",
    "GLOBAL_HOOK_TABLES",
    "HOOK_KEYS",
    "HOOK_TABLES",
    "NOT_READ_BY_MODULES",
    "PARAMETERS",
    "READ_BY_MODULES",
    "as_parameters",
    "autograd_sequence",
    "buffer_table",
    "called_module",
    "check_batch_norm_input",
    "child_table",
    "converted",
    "current_backward_node",
    "graph_task",
    "mark_parameter",
    "profiler_enabled",
    "registered_formula",
    "replace_checkpoint_functions",
    "saved_were_freed",
    "tensor_tables",
]

# -- modules ---------------------------------------------------------------------------------------

# The attribute in which a module keeps its parameters.
PARAMETERS = "_parameters"
# The attribute that makes a custom tensor an instance of nn.Parameter; without effect if torch lacks it.
_IS_PARAMETER = "_is_param"
# The attributes in which a module keeps its hooks.
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The hooks of all modules.
GLOBAL_HOOK_TABLES = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
)

require(nn.Module(), "_apply", "_parameters", "_buffers", "_modules", *HOOK_TABLES)
require(nn.BatchNorm1d, "_check_input_dim")

# Attributes of every module: first those that no call reads, then those that `nn.Module` itself reads in
# a call. An attribute that another version adds is treated as the user's: guarded if the user's code
# names it.
NOT_READ_BY_MODULES = frozenset(
    (
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
        *("_load_state_dict_post_hooks", "_non_persistent_buffers_set"),
    )
)
READ_BY_MODULES = frozenset(
    (
        *("training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"),
        *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook"),
    )
)
# All tables of hooks, and of flags about hooks.
HOOK_KEYS = (READ_BY_MODULES | NOT_READ_BY_MODULES) - {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
}


# A module's own buffers, mutable; `named_buffers` leaves out buffers that are None.
buffer_table: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# A module's own children, mutable; `named_children` leaves out duplicates.
child_table: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def converted(part: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Convert a module by the method of its class that `nn.Module.to` and others call."""
    result: nn.Module = type(part)._apply(part, *args, **kwargs)
    return result


def tensor_tables(layer: nn.Module) -> dict[str, dict[str, Any]]:
    """A module's own tables of parameters and of buffers, mutable, by the attributes that hold them."""
    return {name: vars(layer)[name] for name in (PARAMETERS, "_buffers")}


def mark_parameter(tensor: Any) -> None:
    """Make a tensor an instance of `nn.Parameter`, as torch does for custom tensors."""
    setattr(tensor, _IS_PARAMETER, True)


@contextmanager
def as_parameters(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which tensors are instances of `nn.Parameter`, as `get_parameter` requires."""
    marked = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    for tensor in marked:
        mark_parameter(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            vars(tensor).pop(_IS_PARAMETER, None)


def called_module(forward: Any, module_: nn.Module) -> nn.Module:
    """The module whose forward was called; a hand-made copy may have the forward of another module.

    To be called by ``forward``, which is an attribute of ``module_``.
    """
    frame = sys._getframe(2)
    called = frame.f_locals.get("self") if frame.f_code.co_filename == module.__file__ else None
    return called if called is not None and vars(called).get("forward") is forward else module_


def check_batch_norm_input(layer: Any, input: Tensor) -> None:
    """Raise a batch norm's ValueError if its input has too few or too many dims."""
    layer._check_input_dim(input)


# -- autograd's nodes, the current backward pass, and the profiler ---------------------------------

require(torch._C, "_current_graph_task_id", "_current_autograd_node")
require(torch._C._autograd, "_get_sequence_nr", "_profiler_enabled")
require(torch._C._FunctionBase, "_raw_saved_tensors", "_sequence_nr")

# Whether a profiler records this thread, checked at every call; torch has no public interface for it.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def saved_were_freed(ctx: Any) -> bool:
    """Whether a Function's saved tensors were freed; reading the tensors would run hooks."""
    try:
        ctx._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def graph_task() -> int:
    """The id of the backward pass that is running in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def autograd_sequence() -> int:
    """The next autograd node's number, by which a backward is linked to the line of its forward."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_backward_node() -> int | None:
    """The number of the autograd node whose backward is running; None without a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def registered_formula(node: Any) -> tuple[Any, Any] | None:
    """The backward and setup_context that torch.library.register_autograd registered, from a node.

    torch keeps both functions in the closure of a generated class, to which only autograd nodes refer. If
    another version keeps them elsewhere, the operator is called as torch calls it.
    """
    generated: Any = getattr(type(node), "_forward_cls", None)
    if not getattr(generated, "__name__", "").startswith("GeneratedBackwardFor"):
        return None
    todo: list[Any] = [generated.backward]
    while todo:
        for cell in getattr(todo.pop(), "__closure__", None) or ():
            held = cell.cell_contents
            if hasattr(held, "_backward_fn") and hasattr(held, "_setup_context_fn"):
                return held._backward_fn, held._setup_context_fn
            todo.append(held)  # a function for lists wraps another function
    return None


# -- torch.utils.checkpoint ------------------------------------------------------------------------
# No public interface reveals that a checkpoint begins: saved-tensor hooks see tensors, not the call.

# For use_reentrant=True: an autograd Function.
CHECKPOINT_FUNCTION = "CheckpointFunction"
# For use_reentrant=False: generator functions; torch calls the checkpointed function at their yield. From
# 2.15 on torch uses the second generator; the first remains for other callers.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
# torch's own functions, by name. If a version has other names, its functions run unchanged: a call is not
# a segment, and under a gradient inside a trace it raises an error that recommends torchard.checkpoint.
CHECKPOINT_FUNCTIONS: dict[str, Any] = {
    name: getattr(torchs, name)
    for name in (CHECKPOINT_FUNCTION, *_GENERATORS)
    if hasattr(torchs, name)
}


def replace_checkpoint_functions(functions: dict[str, Any]) -> None:
    """Replace torch's functions with these names, process-wide."""
    for name, function in functions.items():
        setattr(torchs, name, function)
