"""torch.utils.checkpoint inside a traced function: calls become segments, like calls of our checkpoint.

torch recomputes through hooks on the tensors that autograd saves. A trace has no such hooks: the values
to recompute are chosen on the program. So while a function is traced, torch's checkpoint runs its
function once and marks a segment. Private functions of torch are replaced for the duration of a trace;
threads that are not tracing call torch's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from itertools import chain, repeat
from typing import Any

from torch.utils import checkpoint as torchs

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import CheckpointError
from torchard.functional.core.locks import Lock
from torchard.functional.remat.policies import save_nothing
from torchard.functional.tracing.trace_state import active, checkpointed

__all__ = ["recomputed_within", "taken_as_segments"]

_lock = Lock()
_traces = 0
_theirs = internals.CHECKPOINT_FUNCTIONS


def _segments(theirs: Any) -> Callable[..., Generator[None]]:
    """A replacement for a generator function of ``use_reentrant=False``, which yields once."""
    parameters = inspect.signature(theirs)

    def segment(*args: Any, **kwargs: Any) -> Generator[None]:
        if active() is None:
            yield from theirs(_again(args[0]), *args[1:], **kwargs)
            return
        given = parameters.bind(*args, **kwargs).arguments
        if given.get("context_fn", torchs.noop_context_fn) is not torchs.noop_context_fn:
            raise CheckpointError(
                f"{source.of_here()} calls torch.utils.checkpoint.checkpoint(..., context_fn=...) inside "
                "a traced function, where a policy selects what is saved, not a mode of torch's. Use "
                "torchard.checkpoint(fn, policy=...) instead."
            )
        with checkpointed(save_nothing):
            yield

    return segment


class _Reentrant:
    """A replacement for the autograd Function of ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if active() is None:
            run = _again(function, ahead=True)
            return _theirs[internals.CHECKPOINT_FUNCTION].apply(run, preserve_rng_state, *args)
        with checkpointed(save_nothing):
            return function(*args)


_within: ContextVar[Callable[[], Callable[[], Any]] | None] = ContextVar("recomputed", default=None)


@contextlib.contextmanager
def recomputed_within(here: Callable[[], Callable[[], Any]]) -> Iterator[None]:
    """A context outside traces, in which torch's checkpoint recomputes inside a given context.

    Args:
        here: called when a checkpoint begins; returns a function that creates the context.
    """
    token = _within.set(here)
    try:
        with taken_as_segments():
            yield
    finally:
        _within.reset(token)


def _again(function: Callable[..., Any], ahead: bool = False) -> Callable[..., Any]:
    """A function that runs in the present context whenever it is recomputed.

    Args:
        ahead: whether its first call is the forward's, not a recomputation.
    """
    here = _within.get()
    if here is None:
        return function
    contexts = chain([contextlib.nullcontext] * ahead, repeat(here()))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with next(contexts)():
            return function(*args, **kwargs)

    return run


_ours = {
    name: _Reentrant if name == internals.CHECKPOINT_FUNCTION else _segments(function)
    for name, function in _theirs.items()
}


@contextlib.contextmanager
def taken_as_segments() -> Iterator[None]:
    """A context for a trace, in which torch's checkpoint marks segments."""
    global _traces
    with _lock:
        _traces += 1
        internals.replace_checkpoint_functions(_ours)
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                internals.replace_checkpoint_functions(_theirs)
