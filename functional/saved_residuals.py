"""saved_residuals: what a gradient keeps of the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.functional.reports.residuals import Residuals

__all__ = ["saved_residuals"]


@checked
def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """What the gradient of ``fn``, or the gradients taken inside of it, keep of the forward.

    Args:
        fn: a function, transformed or not.
        args, kwargs: what it is called with; meta tensors and `ShapeDtype` will do.
    """
    made = fn if isinstance(fn, Transformed) else Transformed(fn, ())
    return made.lower(*args, **kwargs).residuals
