"""Traceable forwards of torch.nn's batch norms: with cumulative averages, and SyncBatchNorm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchard.functional import torch_internals as internals

__all__ = ["traceable_forward"]


def traceable_forward(part: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, or a traceable one for two that torch's own cannot be traced for.

    With ``momentum=None`` torch reads the number of batches as a Python float. `SyncBatchNorm` calls
    collectives itself, but a function of global arrays has the whole batch already.
    """
    forward = type(part).forward
    averages = forward is nn.BatchNorm1d.forward and getattr(part, "momentum", 0.0) is None
    if averages or forward is nn.SyncBatchNorm.forward:
        return lambda input: _batch_norm(part, input)
    bound: Callable[..., Any] = _bound(type(part), "forward", part)
    return bound


def _bound(cls: type, name: str, instance: Any) -> Any:
    """The attribute of a class with this name, bound to an instance that may hide it."""
    held = inspect.getattr_static(cls, name)
    return held.__get__(instance, cls) if hasattr(held, "__get__") else held


def _batch_norm(part: Any, input: Tensor) -> Tensor:
    internals.check_batch_norm_input(part, input)
    tracked = part.running_mean, part.running_var
    affine = part.weight, part.bias
    if not part.training:
        of_batch = part.running_mean is None
        return F.batch_norm(input, *tracked, *affine, of_batch, 0.0, part.eps)
    if not part.track_running_stats or part.running_mean is None:
        return F.batch_norm(input, None, None, *affine, True, 0.0, part.eps)
    if part.num_batches_tracked is not None:
        part.num_batches_tracked.add_(1)
    if part.momentum is not None or part.num_batches_tracked is None:
        return F.batch_norm(input, *tracked, *affine, True, part.momentum or 0.0, part.eps)
    mean, var = (torch.zeros_like(statistic) for statistic in tracked)
    out = F.batch_norm(input, mean, var, *affine, True, 1.0, part.eps)
    for statistic, new in zip(tracked, (mean, var), strict=True):
        share = part.num_batches_tracked.to(statistic.dtype).reciprocal()
        statistic.copy_(torch.lerp(statistic, new, share))
    return out
