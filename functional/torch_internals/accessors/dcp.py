"""Names that are private in torch.distributed.checkpoint, and in its files all the same."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.accessors.required import needed

__all__ = ["PRIVATE_INDEX_NAMES", "STORAGE_INFO", "storage_info"]

STORAGE_INFO = "_StorageInfo"
# What the pickle of an index names: it is compared with what is in a file, never looked up.
PRIVATE_INDEX_NAMES = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", STORAGE_INFO),
    ("torch.serialization", "_get_layout"),
)


def storage_info(file: str, offset: int, length: int) -> Any:
    """What DCP's index says of where an item is; made by its writer, whose results travel as JSON."""
    with needed():
        from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
