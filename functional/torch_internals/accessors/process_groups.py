"""Backends, timeouts and stores of process groups."""

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
    """The store of the default process group; it has no public interface."""
    return dist.distributed_c10d._get_default_store()


def backend_of(group: Any, device_type: str) -> Any:
    """The backend of a process group for a type of device.

    It has the timeout, which no public interface has, and no dispatch mode sees its sends. torch 2.15 has
    a public name for it.
    """
    find = group._get_backend if hasattr(group, "_get_backend") else group.get_backend
    return find(torch.device(device_type))


def timeout_of(group: Any, device_type: str) -> datetime.timedelta | None:
    """The timeout of a collective; None for a backend without one."""
    # Not public, but a mesh must not wait longer than the group it was made from.
    return getattr(getattr(backend_of(group, device_type), "options", None), "_timeout", None)


def set_timeout(group: Any, device_type: str, timeout: datetime.timedelta) -> None:
    """Set the timeout of an existing group; public from torch 2.15 on."""
    backend = backend_of(group, device_type)
    private = getattr(backend, "_set_default_timeout", None)
    (backend.set_timeout if private is None else private)(timeout)
