"""Parts of torch that not every process uses: process groups, distributed checkpoints, compilers."""

from __future__ import annotations

import datetime
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from torchard.functional.torch_internals.accessors.required import needed, require

__all__ = [
    "PRIVATE_INDEX_NAMES",
    "STORAGE_INFO",
    "activation_memory_budget",
    "backend_of",
    "compile_in_this_process",
    "default_store",
    "set_timeout",
    "storage_info",
    "timeout_of",
]

# -- process groups --------------------------------------------------------------------------------

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


# -- torch.distributed.checkpoint ------------------------------------------------------------------

STORAGE_INFO = "_StorageInfo"
# The private names in the pickle of an index: compared with those in a file, never looked up.
PRIVATE_INDEX_NAMES = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", STORAGE_INFO),
    ("torch.serialization", "_get_layout"),
)


def storage_info(file: str, offset: int, length: int) -> Any:
    """The location of an item in DCP's index; ranks send it as JSON."""
    with needed():
        from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


# -- settings of compilers that torch.compiler does not expose -------------------------------------

def compile_in_this_process() -> None:
    """Make Inductor compile without subprocesses; its environment variable is only read at import."""
    with needed():
        from torch._inductor import config

        require(config, "compile_threads")
    config.compile_threads = 1


def activation_memory_budget(fraction: float) -> AbstractContextManager[None]:
    """A context with the fraction of residuals that torch.compile's partitioner may keep."""
    with needed():
        from torch._functorch import config

        require(config, "activation_memory_budget")
    patched: AbstractContextManager[None] = config.patch(activation_memory_budget=fraction)
    return patched
