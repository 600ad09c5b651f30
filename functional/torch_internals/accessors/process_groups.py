"""Process groups: who carries their tensors, how long they wait, where they keep their store."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from torchard.functional.torch_internals.accessors.required import require

__all__ = ["backend_of", "default_store", "set_timeout", "timeout_of"]

if dist.is_available():
    require(dist.distributed_c10d, "_get_default_store")


def default_store() -> Any:
    """That of the default process group; there is no public way to the store."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: Any, device_type: str) -> Any:
    """What carries a process group's tensors of a device.

    It says how long it waits, which nothing public does, and its sends are seen by no dispatch mode.
    torch 2.15 has a public name for it.
    """
    find = group._get_backend if hasattr(group, "_get_backend") else group.get_backend
    return find(torch.device(device_type))


def timeout_of(group: Any, device_type: str) -> datetime.timedelta | None:
    """How long ranks wait for one another in a collective; None for a backend that does not say."""
    # There is no public way to it, and a mesh must not wait longer than the group it was made from.
    return getattr(getattr(backend_of(group, device_type), "options", None), "_timeout", None)


def set_timeout(group: Any, device_type: str, timeout: datetime.timedelta) -> None:
    """Let ranks wait that long; of a group that is there already, 2.15 is the first to do it publicly."""
    backend = backend_of(group, device_type)
    private = getattr(backend, "_set_default_timeout", None)
    (backend.set_timeout if private is None else private)(timeout)
