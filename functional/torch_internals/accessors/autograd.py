"""Autograd nodes, and the running backward pass and profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "autograd_sequence",
    "current_backward_node",
    "graph_task",
    "profiler_enabled",
    "registered_formula",
    "saved_were_freed",
]

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
    """The id of the backward pass running in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def autograd_sequence() -> int:
    """The number of the next autograd node, which links a backward to the line of its forward."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_backward_node() -> int | None:
    """The number of the autograd node whose backward is running; None if none is."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def registered_formula(node: Any) -> tuple[Any, Any] | None:
    """The backward and setup_context that torch.library.register_autograd registered, from a node.

    torch keeps them in the closure of a generated class, which only autograd nodes refer to. If another
    version keeps them elsewhere, the operator is called as torch calls it.
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
            todo.append(held)  # a function for lists wraps another
    return None
