"""trace(f)(*args) -> Lowered: what a function computes, on shapes alone; and labels for its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.core.arguments import checked
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.signature import paths_of, read
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import active, scope

__all__ = ["name", "scope", "trace"]


@checked
def trace(fn: Callable[..., Any]) -> Callable[..., Lowered]:
    """``trace(f)(*args)`` is the program of f for arguments of these shapes; nothing is computed.

    Tensors (also on ``meta``), placed values, Python floats and ShapeDtype are traced, everything
    else is static. Tensors f closes over become inputs of role ``closure``.

    Raises:
        PurityError: f branches on a tensor's value, changes an argument in place, or draws from
            the global random state.
        StaticArgumentError: an argument is neither traced nor hashable.
    """

    def traced(*args: Any, **kwargs: Any) -> Lowered:
        return Lowered.of(trace_call(fn, read(args, kwargs), paths_of(args, kwargs)))

    return traced


@checked
def name(value: torch.Tensor, label: str) -> torch.Tensor:
    """Label a value: policies and ``constrain_at`` select it by that. Returns it unchanged."""
    room = active()
    if room is not None:
        room.label(value, label)
    return value
