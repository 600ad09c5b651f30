"""torch.compile around and inside of this library's functions: it compiles neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchard.functional.core.locks import Lock

__all__ = ["outside_of_compile", "uncompiled"]


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


# torch.compile breaks its graph here, and runs what this library made as it is.
outside_of_compile: Any = torch.compiler.disable(
    _call,
    reason="torch.compile does not compile functions of torchard: torchard.jit(fn) does, and "
    "torch.compile runs them as they are, between its graphs (fullgraph=False)",
)


class _Stance:
    """The process's stance towards compiled functions, which threads share."""

    def __init__(self) -> None:
        self.lock, self.users, self.set = Lock(), 0, Any

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                self.set = torch.compiler.set_stance("force_eager")
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.set.__exit__(None, None, None)


_stance = _Stance()


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which functions and modules that torch.compile has made run as they were written.

    It cannot compile a function on tensors of a trace, nor one that calls parts of a functionalized
    module. For the time of it, threads besides this one do not compile either.
    """
    try:
        _stance.enter()
    except RuntimeError:  # torch refuses where it is about to compile; it gave up on these frames
        yield
        return
    try:
        yield
    finally:
        _stance.leave()
