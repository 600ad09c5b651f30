"""error_if: an error if a value that is computed says so."""

from __future__ import annotations

import re
from string import Formatter
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

    Raises:
        ValueError: the message is no format string of the values.

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
    _check_names(message, values)

    def look(wrong: bool | torch.Tensor, values: dict[str, Any]) -> None:
        if wrong:
            raise CheckError(_formatted(message, values), line)

    # So that ranks exchange one value of the condition.
    wrong = pred.any() if isinstance(pred, torch.Tensor) else pred
    called_for_effect("error_if", look, (wrong, values), everywhere=True)


def _check_names(message: str, values: dict[str, Any]) -> None:
    """Check when it is called that a message can be formatted, which happens when it is raised.

    Raises:
        ValueError: it is no format string, or shows a value that is not given.
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(message) if field is not None]
    except ValueError as error:
        raise ValueError(f"error_if: message is {message!r}: {error}; write braces twice.") from None
    for field in fields:
        name = re.split(r"[.\[]", field)[0]
        if name not in values:
            given = ", ".join(values) or "none"
            raise ValueError(
                f"error_if: message is {message!r} and shows {name!r}, which is not among the values "
                f"({given}); write braces twice that are not of a field."
            )


def _formatted(message: str, values: dict[str, Any]) -> str:
    try:
        return message.format(**values)
    except (TypeError, ValueError):  # a format for numbers, and a tensor of several
        return f"{message} ({', '.join(f'{name} is {value}' for name, value in values.items())})"
