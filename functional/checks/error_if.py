"""error_if: an error if a value that is computed says so."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional.callbacks.calls import called_for_effect
from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked as arguments_checked
from torchard.functional.core.errors import CheckError

__all__ = ["error_if"]


@arguments_checked
def error_if(pred: bool | torch.Tensor, message: str, **values: Any) -> None:
    """Raise an error when a condition is computed and is true.

    It is an effect, as `debug.print` is: once for each evaluation of the function as written, in the
    order of the source; in a branch if it is taken; not where a derivative computes the forward again.
    Under vmap the error names the example. On a mesh all ranks raise it: they exchange whether the
    condition is true, and gather the values that the message shows.

    Args:
        pred: a bool, or a tensor of them: the error is raised if one of them is true.
        message: a format string of the values.
        values: what the message shows: trees of tensors and anything else.

    Returns:
        None.

    Raises (when it is computed):
        CheckError: the condition is true; names the line, the scope with its iteration, and the rank.

    Source: ``equinox.error_if``; ``jax.experimental.checkify.check``.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def descend(x):
    ...     def step(i, x):
    ...         ta.error_if(x > 1e3, "diverged: x is {x:.0f}", x=x)
    ...         return x * x
    ...     return ta.fori_loop(0, 9, step, x)
    >>> descend(torch.tensor(0.5))
    tensor(0.)
    >>> descend(torch.tensor(3.0))
    Traceback (most recent call last):
        ...
    torchard.CheckError: <doctest error_if[1]>:4 in step: diverged: x is 6561 (fori/3 forward)
    """

    line = source.of_here() or ""

    def look(wrong: bool | torch.Tensor, values: dict[str, Any]) -> None:
        if wrong:
            raise CheckError(message.format(**values), line)

    # So that ranks exchange one value of the condition.
    wrong = pred.any() if isinstance(pred, torch.Tensor) else pred
    called_for_effect("error_if", look, (wrong, values), everywhere=True)
