"""What transforms return: a callable around the function that was transformed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Wrapper"]


class Wrapper:
    """A callable around ``fn``; what that closes over and reads is what a trace of it depends on.

    Attributes:
        fn: the function.
        rewrites: what is done to its program, which a trace depends on too.
    """

    fn: Callable[..., Any]
    rewrites: tuple[Any, ...] = ()
