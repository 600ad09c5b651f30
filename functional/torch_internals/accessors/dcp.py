"""Private names of torch.distributed.checkpoint that its files contain."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.accessors.required import needed

__all__ = ["PRIVATE_INDEX_NAMES", "STORAGE_INFO", "storage_info"]

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
