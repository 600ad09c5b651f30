"""The base class of what transforms return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Wrapper"]


class Wrapper:
    """A callable around ``fn``; a trace of it depends on what ``fn`` closes over and reads.

    Attributes:
        fn: the function.
        rewrites: the rewrites of its program, which a trace depends on too.
    """

    fn: Callable[..., Any]
    rewrites: tuple[Any, ...] = ()
