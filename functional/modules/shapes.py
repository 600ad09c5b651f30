"""Errors of a call whose parameters are not of the module's shapes: which they are is noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

__all__ = ["shapes_noted"]


@contextmanager
def shapes_noted(params: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> Iterator[None]:
    """A context of a call, which may be right with other shapes: those of a part of each parameter.

    Args:
        params: the parameters of the call.
        shapes: the shapes of the module's parameters.
    """
    try:
        yield
    except Exception as error:
        for name, shape in shapes.items():
            if (have := list(params[name].shape)) != shape:
                error.add_note(
                    f"params[{name!r}] is {have}, and {shape} in the module that was functionalized"
                )
        raise
