"""The base classes of what transforms return, and of functions made of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchard.functional.core.module_methods import missing

__all__ = ["ModuleCopy", "Wrapper"]


class Wrapper:
    """A callable around ``fn``; a trace of it depends on what ``fn`` closes over and reads.

    Attributes:
        fn: the function.
        rewrites: the rewrites of its program, which a trace depends on too.
    """

    fn: Callable[..., Any]
    rewrites: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead of a method of modules, where ``fn`` was made of one."""
        fn = vars(self).get("fn")
        if isinstance(fn, ModuleCopy):
            raise missing(name, fn.module, "fn.fn")
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)


class ModuleCopy:
    """A callable with a private copy of a module, whose code a trace depends on.

    Attributes:
        module: the copy.
    """

    __slots__ = ()
    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Say what to do instead of a method of modules, of which this is none."""
        raise missing(name, object.__getattribute__(self, "module"), "fn")

    def tensors_in(self, tables: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of what is in tables of the copy, between calls or before this one."""
        raise NotImplementedError
