"""torch.utils.checkpoint inside a traced function: its calls are segments, as our own checkpoint's are.

torch recomputes through hooks on the tensors that autograd saves. A trace has no such hooks: what is
recomputed is decided on the program. So while a function is traced, torch's checkpoint runs its function
once and marks a segment. Private functions of torch are replaced for the duration of a trace; a thread
that is not tracing calls torch's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils import checkpoint as torchs

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import CheckpointError
from torchard.functional.core.locks import Lock
from torchard.functional.remat.policies import save_nothing
from torchard.functional.tracing.trace_state import active, checkpointed

__all__ = ["taken_as_segments"]

_lock = Lock()
_traces = 0
_theirs = internals.CHECKPOINT_FUNCTIONS


def _segments(theirs: Any) -> Callable[..., Generator[None]]:
    """A replacement for a generator function of ``use_reentrant=False``, which yields once."""
    parameters = inspect.signature(theirs)

    def segment(*args: Any, **kwargs: Any) -> Generator[None]:
        if active() is None:
            yield from theirs(*args, **kwargs)
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
            return _theirs[internals.CHECKPOINT_FUNCTION].apply(function, preserve_rng_state, *args)
        with checkpointed(save_nothing):
            return function(*args)


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
