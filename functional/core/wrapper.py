"""The base classes of what transforms return, and of functions made of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["ModuleCopy", "Wrapper"]


class Wrapper:
    """A callable around ``fn``; a trace of it depends on what ``fn`` closes over and reads.

    Attributes:
        fn: the function.
        rewrites: the rewrites of its program, which a trace depends on too.
    """

    fn: Callable[..., Any]
    rewrites: tuple[Any, ...] = ()


class ModuleCopy:
    """A callable with a private copy of a module, whose code a trace depends on.

    Attributes:
        module: the copy.
    """

    __slots__ = ()
    module: nn.Module

    def tensors_in(self, tables: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of what is in tables of the copy, between calls or before this one."""
        raise NotImplementedError
