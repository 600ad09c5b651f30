"""Reading the index of a checkpoint without executing it.

DCP's index is a pickle, and a pickle is a program. Here it may create plain values and records without
methods only; the result is validated completely before it is used.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Size
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchard.functional import torch_internals as internals
from torchard.sharding.checkpointing.storage_errors import StorageError
from torchard.sharding.checkpointing.unfinished import leftovers

__all__ = ["INDEX", "Index", "ItemLocation", "check_disjoint", "file_of", "read_index"]

INDEX = ".metadata"
# The number of cells into which the boxes of one value may divide it.
_PIECES = 10_000_000
_METADATA = "torch.distributed.checkpoint.metadata"
# The classes of which the pickle may create records.
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    (_METADATA, "TensorProperties"),
    *internals.PRIVATE_INDEX_NAMES,
    *(
        (module, f"{pure}{system}Path")
        for module in ("pathlib", "pathlib._local")
        for pure in ("", "Pure")
        for system in ("Posix", "Windows")
    ),
}
StorageMetadata = TensorStorageMetadata | BytesStorageMetadata


class ItemLocation(NamedTuple):
    """The location of an item's bytes, and the transforms to decode them (DCP's names)."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class Index(NamedTuple):
    """The contents of a checkpoint by key, and the location of each box."""

    entries: dict[str, StorageMetadata]
    places: dict[MetadataIndex, ItemLocation]


class _Record:
    """A record of the arguments and the state of a DCP class, without its methods."""

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.__dict__["args"] = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates records for the classes of DCP's index, and refuses all other names."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self.where = where
        # New classes for each pickle, which may set attributes of the classes it names.
        self.kinds = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.kinds:
            return self.kinds[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if value is Size or isinstance(value, torch.dtype):
            return value
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise StorageError(
            f"{self.where} names {module}.{name}, which does not belong in DCP's index. A pickle that "
            "names other objects can run arbitrary code, so it was not read. Do not use this checkpoint "
            "unless you trust its source."
        )


def read_index(path: Path) -> Index:
    """The index of a checkpoint, read as untrusted data.

    Raises:
        StorageError: there is no index; or it is damaged, or names objects that do not belong in one.
    """
    if not path.is_dir():
        unfinished = leftovers(path)
        also = (
            f"; {unfinished[0]} belongs to an incomplete save, and cannot be loaded"
            if unfinished
            else ""
        )
        raise StorageError(f"there is no checkpoint at {path}{also}. Pass the directory of a save.")
    file = file_of(path, INDEX)
    if not file.exists():
        raise StorageError(
            f"{path} is not a checkpoint: it has no file {INDEX}, which is written last. Pass a "
            "directory written by a completed save(), or by torch.distributed.checkpoint."
        )
    where = str(file)
    try:
        root = _Unpickler(file.read_bytes(), where).load()
    except StorageError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        _damaged(where, f"it cannot be read ({type(error).__name__}: {error})")
    known = _fields(root, "Metadata", where)
    entries, places = known.get("state_dict_metadata"), known.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        _damaged(where, "it lists no values, or no locations of them")
    return Index(
        {_text(key, where): _entry(value, where) for key, value in entries.items()},
        {_key(key, where): _place(value, where) for key, value in places.items()},
    )


def file_of(path: Path, name: str) -> Path:
    """The file that an index names, which must be in the checkpoint's directory.

    Raises:
        StorageError: it is outside, or is not a regular file.
    """
    pure = PurePosixPath(name)
    outside = pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name
    if outside or not (path / pure).resolve().is_relative_to(path.resolve()):
        raise StorageError(
            f"{path} names the file {name!r}, which is outside of its directory, or a link that leads "
            "out of it, so it was not read. If you trust that file, put a copy of it in the directory."
        )
    file = path / pure
    if file.exists() and not file.is_file():
        raise StorageError(f"{file} is not a regular file. Use another checkpoint.")
    return file


def check_disjoint(key: str, saved: TensorStorageMetadata, path: Path) -> None:
    """Check that boxes do not overlap, since their number of elements is then no proof of coverage.

    Raises:
        StorageError: boxes overlap, or one is not within the value.
    """
    boxes = [(tuple(box.offsets), tuple(box.sizes)) for box in saved.chunks if 0 not in box.sizes]
    cuts = []
    for d, size in enumerate(saved.size):
        ends = {(at[d], at[d] + n[d]) for at, n in boxes}
        if any(start < 0 or stop > size for start, stop in ends):
            _damaged(
                str(path / INDEX), f"a box of {key!r} is not within its shape {list(saved.size)}"
            )
        cuts.append({n: i for i, n in enumerate(sorted({n for pair in ends for n in pair}))})
    pieces = [max(len(cut) - 1, 1) for cut in cuts]
    if np.prod(pieces, dtype=float) > _PIECES:
        _damaged(
            str(path / INDEX), f"the boxes of {key!r} divide it into more than {_PIECES:,} cells"
        )
    times = np.zeros(pieces, dtype=np.int32)
    for at, sizes in boxes:
        times[
            tuple(slice(cut[a], cut[a + n]) for cut, a, n in zip(cuts, at, sizes, strict=True))
        ] += 1
    if (times > 1).any():
        _damaged(str(path / INDEX), f"boxes of {key!r} overlap")


def _damaged(where: str, why: str) -> NoReturn:
    raise StorageError(
        f"{where} is damaged, or is not an index of DCP: {why}. Use another checkpoint."
    )


def _fields(value: Any, kind: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        _damaged(where, f"it has a {type(value).__name__} instead of a {kind}")
    state = value.__dict__.get("state", {})
    if not isinstance(state, dict):
        _damaged(where, f"a {kind} has no fields")
    return state


def _text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _damaged(where, f"{value!r} is not a string")


def _whole(value: Any, where: str) -> int:
    if type(value) is int and value >= 0:
        return value
    _damaged(where, f"{value!r} is not a size")


def _size(value: Any, where: str) -> Size:
    if not isinstance(value, Size | tuple | list):
        _damaged(where, f"{value!r} is not a shape")
    return Size([_whole(n, where) for n in value])


def _entry(value: Any, where: str) -> StorageMetadata:
    if isinstance(value, _Record) and type(value).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    known = _fields(value, "TensorStorageMetadata", where)
    size = _size(known.get("size"), where)
    chunks = known.get("chunks")
    if not isinstance(chunks, list):
        _damaged(where, "a tensor has no boxes")
    boxes = [_box(chunk, len(size), where) for chunk in chunks]
    return TensorStorageMetadata(_properties(known.get("properties"), where), size, boxes)


def _box(value: Any, ndim: int, where: str) -> ChunkStorageMetadata:
    known = _fields(value, "ChunkStorageMetadata", where)
    offsets, sizes = _size(known.get("offsets"), where), _size(known.get("sizes"), where)
    if not len(offsets) == len(sizes) == ndim:
        _damaged(
            where, f"a tensor of {ndim} dims has a box at {list(offsets)} of sizes {list(sizes)}"
        )
    return ChunkStorageMetadata(offsets, sizes)


def _properties(value: Any, where: str) -> TensorProperties:
    """A record of tensor properties, of which only the dtype is used."""
    if isinstance(value, _Record) and type(value).__name__ == "TensorProperties":
        state = value.__dict__.get("state")
        dtype = state[0] if isinstance(state, tuple) and state else None
        if isinstance(dtype, torch.dtype):
            return TensorProperties(dtype=dtype)
    _damaged(where, "a tensor has no dtype")


def _key(value: Any, where: str) -> MetadataIndex:
    known = _fields(value, "MetadataIndex", where)
    offset = known.get("offset")
    place = None if offset is None else _size(offset, where)
    return MetadataIndex(_text(known.get("fqn"), where), place)


def _place(value: Any, where: str) -> ItemLocation:
    known = _fields(value, internals.STORAGE_INFO, where)
    transforms: Sequence[Any] = known.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple):
        _damaged(where, f"{transforms!r} is not a list of transforms")
    return ItemLocation(
        _text(known.get("relative_path"), where),
        _whole(known.get("offset"), where),
        _whole(known.get("length"), where),
        tuple(_text(name, where) for name in transforms),
    )
