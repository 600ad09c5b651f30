"""Autograd's nodes, and what is going on in this thread."""

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

# Whether a profiler records this thread; asked at every call, and torch has no public way to ask.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def saved_were_freed(ctx: Any) -> bool:
    """Whether a Function's saved tensors are gone; asking for the tensors would run hooks on them."""
    try:
        ctx._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def graph_task() -> int:
    """Which backward pass is running in this thread; -1 for none. It tells the phases apart."""
    return torch._C._current_graph_task_id()


def autograd_sequence() -> int:
    """The number the next autograd node gets: what links a backward to its forward's line."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_backward_node() -> int | None:
    """The number of the autograd node being run backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def registered_formula(node: Any) -> tuple[Any, Any] | None:
    """What torch.library.register_autograd was given: backward and setup_context of autograd's node.

    torch keeps them in the closure of a class that it generates, and hands that out with the node alone.
    Where another version keeps them elsewhere, the operator is called as torch calls it.
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
            todo.append(held)  # one that takes lists wraps another
    return None
