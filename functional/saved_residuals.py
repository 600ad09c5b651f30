"""saved_residuals: the values of the forward that a gradient keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.functional.reports.residuals import Residuals

__all__ = ["saved_residuals"]


@checked
def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """List the values of the forward that are saved for the gradient of a function, or inside of it.

    Args:
        fn: a function, transformed or not.
        args: its arguments; tensors on ``meta`` and `ShapeDtype` suffice.
        kwargs: its keyword arguments.

    Returns:
        A list of records that prints as a table: kind, what, name, shape, dtype, bytes on one device,
        scope, source line, and why the value is saved. ``.bytes`` is the total without arguments.

    Source: ``jax.ad_checkpoint.print_saved_residuals``.

    >>> import torch, torchard as ta
    >>> kept = ta.saved_residuals(lambda x: ta.name(x.sin(), "angle").exp().sum(), torch.ones(1000))
    >>> [(r.what, r.bytes) for r in kept], kept.bytes
    ([('args[0]', 4000), ('aten.exp', 4000)], 4000)
    """
    transformed = fn if isinstance(fn, Transformed) else Transformed(fn, ())
    return transformed.lower(*args, **kwargs).residuals
