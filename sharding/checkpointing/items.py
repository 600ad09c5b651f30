"""The items in a checkpoint's files: reading their bytes, checking their checksums, decoding them.

Checksums are in a file of their own, which DCP ignores. They detect damage, not tampering: whoever can
change items can change checksums too.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from torchard.functional import torch_internals as internals
from torchard.sharding.checkpointing.checkpoint_leaves import kind_of
from torchard.sharding.checkpointing.dcp_chunks import Reads
from torchard.sharding.checkpointing.index import INDEX, Index, ItemLocation, file_of
from torchard.sharding.checkpointing.storage_errors import StorageError

__all__ = ["Checksums", "packed", "read_items", "unpacked"]

CHECKSUMS = ".checksums"
_ALGORITHM = "crc32"
_CHUNK = 1 << 20


class _Slice(io.RawIOBase):
    """The bytes of one item, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._length - self._at), 0)
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[:count])
        self._at += count
        return count


def checksum_of(file: BinaryIO, offset: int, length: int) -> int | None:
    """The checksum of some bytes of a file; None if it ends before them."""
    crc, left = 0, length
    file.seek(offset)
    while left:
        data = file.read(min(_CHUNK, left))
        if not data:
            return None
        crc, left = zlib.crc32(data, crc), left - len(data)
    return crc


class Checksums:
    """The checksums of all items of a checkpoint, by file and position, and of its index."""

    def __init__(self, items: dict[tuple[str, int, int], int], index: int) -> None:
        self.items, self.index = items, index

    @staticmethod
    def write(path: Path, items: Iterable[tuple[str, int, int, int]]) -> None:
        """Write the checksums next to the index, which exists."""
        index = zlib.crc32((path / INDEX).read_bytes())
        record = {"algorithm": _ALGORITHM, "index": index, "items": sorted(items)}
        (path / CHECKSUMS).write_text(json.dumps(record))

    @staticmethod
    def read(path: Path) -> Checksums | None:
        """The written checksums; None if there are none, as in checkpoints of plain DCP.

        Raises:
            StorageError: the checksums are damaged, or belong to another index.
        """
        file = file_of(path, CHECKSUMS)
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_bytes())
            checksums = Checksums(
                {(str(name), int(at), int(n)): int(crc) for name, at, n, crc in record["items"]},
                int(record["index"]),
            )
            known = record["algorithm"] == _ALGORITHM
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{file} is damaged. Use another checkpoint.") from error
        if not known or checksums.index != zlib.crc32(file_of(path, INDEX).read_bytes()):
            raise StorageError(
                f"{path / INDEX} does not match {CHECKSUMS}: one of them is damaged, or the checkpoint "
                f"was overwritten by another program. Use another checkpoint, or remove {CHECKSUMS} if "
                "you know that the checkpoint is intact."
            )
        return checksums

    def check(self, file: BinaryIO, place: ItemLocation, what: str) -> None:
        """Check the bytes of an item.

        Raises:
            StorageError: they are not those that were written.
        """
        name, offset, length, _ = place
        want = self.items.get((name, offset, length))
        if want is None or checksum_of(file, offset, length) != want:
            raise StorageError(
                f"{what}: its bytes in {name} differ from those that were written: the file is "
                "damaged. Use another checkpoint."
            )


def packed(written: Iterable[WriteResult], path: Path) -> str:
    """The write results of one rank, with checksums, as text for the rank that writes the index."""
    rows = []
    for result in written:
        info, index = result.storage_data, result.index
        with open(path / info.relative_path, "rb") as file:
            crc = checksum_of(file, info.offset, info.length)
        place = [info.relative_path, info.offset, info.length, crc]
        rows.append([index.fqn, index.offset, result.size_in_bytes, place])
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpacked(text: str) -> tuple[list[WriteResult], list[tuple[str, int, int, int]]]:
    """A rank's write results from text: DCP's results, and the place and checksum of each item."""
    results, checksums = [], []
    for key, offset, size, (name, at, length, crc) in json.loads(
        zlib.decompress(base64.b64decode(text))
    ):
        results.append(
            WriteResult(MetadataIndex(key, offset), size, internals.storage_info(name, at, length))
        )
        checksums.append((name, at, length, crc))
    return results, checksums


def read_items(path: Path, index: Index, planner: Reads) -> bool:
    """Read the items of a planner, each item completely, and pass them to the planner.

    Returns:
        Whether there are checksums; all of them were correct.

    Raises:
        StorageError: an item is damaged, or differs from the index.
    """
    checksums, reader = Checksums.read(path), FileSystemReader(path)
    by_file: dict[str, list[tuple[ReadItem, ItemLocation]]] = {}
    for item in planner.items:
        place = index.places.get(item.storage_index)
        if place is None:
            raise StorageError(
                f"the index of {path} has no location of {_name(item)}. Use another checkpoint."
            )
        by_file.setdefault(place.file, []).append((item, place))
    for name, items in by_file.items():
        with _opened(path, name, items[0][0]) as file:
            for item, place in items:
                what = f"{_name(item)} of {path}"
                if checksums is not None:
                    checksums.check(file, place, what)
                _read(reader, file, item, place, planner, what)
    return checksums is not None


def _opened(path: Path, name: str, item: ReadItem) -> io.BufferedReader:
    """A file of items, the first of which is named in messages."""
    try:
        return open(file_of(path, name), "rb")
    except FileNotFoundError as error:
        raise StorageError(
            f"{path} lacks the file {name}, in which {_name(item)} is according to its index: the "
            "file was deleted, or not copied with the others. Copy it again, or use another "
            "checkpoint."
        ) from error


def _name(item: ReadItem) -> str:
    at = item.storage_index.offset
    return f"{item.storage_index.fqn!r}" + (f" at offsets {list(at)}" if at else "")


def _read(
    reader: FileSystemReader,
    file: io.BufferedReader,
    item: ReadItem,
    place: ItemLocation,
    planner: Reads,
    what: str,
) -> None:
    stream: Any = io.BufferedReader(_Slice(file, place.offset, place.length), _CHUNK)
    if place.transforms:  # for example compressed by a DCP extension
        stream = reader.transforms.transform_load_stream(item, place.transforms, stream)
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(stream.read()))
        return
    if not stream.seekable():
        stream = io.BytesIO(stream.read())
    box = torch.load(stream, map_location="cpu", weights_only=True)
    _check_is(box, kind_of(*planner.kinds[item.storage_index]), what)
    for d, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(d, start, length)
    target = planner.resolve_tensor(item)
    target.detach().copy_(box)
    planner.commit_tensor(item, target)


def _check_is(value: Any, kind: str, what: str) -> None:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    have = kind_of(value.dtype, value.shape) if plain else type(value).__name__
    if have != kind or value.device.type != "cpu":
        raise StorageError(
            f"{what} is {have}, but the index says {kind}: one of them is damaged. Use another "
            "checkpoint."
        )
