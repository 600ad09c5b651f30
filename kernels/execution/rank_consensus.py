"""One choice of an implementation for all processes.

Implementations of one computation round differently. Replicated values must be equal on all ranks to the
last bit, or they diverge: so ranks must not choose independently.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from torchard.functional.torch_internals.accessors.optional import default_store
from torchard.functional.torch_internals.store import ask

__all__ = ["agreed_choice"]

# The timeout, in seconds, for reading the choice from the store.
_PATIENCE = 60.0


def agreed_choice(subject: str, mine: str) -> str:
    """The choice of the first process to choose; ``mine`` if that is this process, or the only one.

    Args:
        subject: the subject of the choice, as equal text on all ranks.

    Raises:
        StoreError: the process group's store does not answer.
    """
    if _alone():
        return mine
    store, key = default_store(), hashlib.sha256(subject.encode()).hexdigest()
    chosen: bytes = ask(
        store,
        lambda: store.compare_set(f"torchard/choice/{key}", "", mine),
        _PATIENCE,
        "which kernels they run",
    )
    return chosen.decode()


def _alone() -> bool:
    """Whether this process chooses by itself; torch's fake group is one process, whatever its size."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"
