"""One choice for all processes.

Ways to compute the same round differently. Values that all ranks hold must be the same on all of them to
the last bit, or they drift apart: so ranks do not choose each for itself.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist

from torchard.functional.torch_internals.accessors.process_groups import default_store
from torchard.functional.torch_internals.store import ask

__all__ = ["settled"]

# Seconds within which the store tells what has been chosen.
_PATIENCE = 60.0


def settled(what: str, mine: str) -> str:
    """What the first process in the process group chose; mine, if it is that or the only one.

    Args:
        what: the choice is about, in the same words everywhere.

    Raises:
        StoreError: the process group's store does not answer.
    """
    if _alone():
        return mine
    store, key = default_store(), hashlib.sha256(what.encode()).hexdigest()
    chosen: bytes = ask(
        store,
        lambda: store.compare_set(f"torchard/choice/{key}", "", mine),
        _PATIENCE,
        "which kernels they run",
    )
    return chosen.decode()


def _alone() -> bool:
    """Whether nobody else chooses: torch's fake group has one process, whatever its size."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"
