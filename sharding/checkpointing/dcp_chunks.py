"""Values as boxes, the chunks in which torch.distributed.checkpoint (DCP) reads and writes tensors.

DCP stores a tensor as boxes, whichever rank wrote them. A shard is one box, or several if its indices
along a dim are not contiguous. For example, a rank's heads in a fused projection are not adjacent.
Nothing here depends on trees, ranks or files.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torchard.sharding.layouts.layout import Coords, Dim, Layout, chunk
from torchard.sharding.values.place import MeshTensor

__all__ = ["Reads", "Writes", "entry"]


class IndexRun(NamedTuple):
    """A run of consecutive indices of a dim: from ``start`` in the value, from ``local`` in the shard."""

    start: int
    local: int
    length: int


Box = tuple[IndexRun, ...]  # a run for each dim


def runs(dim: Dim, at: Coords, sizes: Mapping[str, int]) -> list[IndexRun]:
    """The indices of a dim that a coordinate holds, as the fewest runs."""
    held, inner = [range(1)], 1
    for sub in reversed(dim):
        own = chunk(sub.size, sub.axes, at, sizes)
        if held == [range(inner)]:
            held = [range(own.start * inner, own.stop * inner)]
        else:
            held = [range(r.start + i * inner, r.stop + i * inner) for i in own for r in held]
        inner *= sub.size
    ends = itertools.accumulate(map(len, held), initial=0)
    return [IndexRun(r.start, end, len(r)) for r, end in zip(held, ends, strict=False) if len(r)]


def _overlap(held: Iterable[IndexRun], start: int, length: int) -> list[IndexRun]:
    """The overlaps of runs with a range, with starts relative to the start of the range."""
    overlaps = []
    for run in held:
        low, high = max(run.start, start), min(run.start + run.length, start + length)
        if low < high:
            overlaps.append(IndexRun(low - start, low - run.start + run.local, high - low))
    return overlaps


def _shards(value: Any, everywhere: bool = False) -> Iterator[list[list[IndexRun]]]:
    """The runs of each dim for each shard of this process, or for all distinct shards."""
    if isinstance(value, MeshTensor):
        layout, sizes = value.layout, value.mesh.shape
        places = layout.keys(sizes) if everywhere else value._held.places
    else:
        layout, sizes, places = Layout.replicated(value.shape), {}, [{}]
    for at in places:
        yield [runs(dim, at, sizes) for dim in layout.dims]


def _parts(value: Any) -> Sequence[Tensor]:
    return value.parts if isinstance(value, MeshTensor) else [value]


def _cut(part: Tensor, box: Box) -> Tensor:
    """A box of a shard, as a view."""
    for d, run in enumerate(box):
        part = part.narrow(d, run.local, run.length)
    return part


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(r.start for r in box), Size(r.length for r in box))


def entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """A value's index entry: all of its boxes, on any rank."""
    if not isinstance(value, MeshTensor | Tensor):
        return BytesStorageMetadata()
    boxes = [box for shard in _shards(value, everywhere=True) for box in itertools.product(*shard)]
    properties = TensorProperties(dtype=value.dtype)
    return TensorStorageMetadata(properties, value.shape, [_chunk(box) for box in boxes])


class Writes(DefaultSavePlanner):
    """The save planner, which gives DCP's writer its data.

    Args:
        values: the values that this process writes, by key.

    Attributes:
        items: the write items.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._data: dict[MetadataIndex, Any] = {}
        self.items: list[WriteItem] = []
        for key, value in values.items():
            if isinstance(value, MeshTensor | Tensor):
                self._add_tensor(key, value)
            else:
                self._add(MetadataIndex(key), value, WriteItemType.BYTE_IO)

    def _add_tensor(self, key: str, value: Any) -> None:
        properties = TensorProperties(dtype=value.dtype)
        for part, shard in zip(_parts(value), _shards(value), strict=True):
            for box in itertools.product(*shard):
                data = TensorWriteData(_chunk(box), properties, value.shape)
                index = MetadataIndex(key, data.chunk.offsets)
                self._add(index, _cut(part.detach(), box), WriteItemType.SHARD, data)

    def _add(self, index: MetadataIndex, value: Any, kind: WriteItemType, data: Any = None) -> None:
        self._data[index] = value
        self.items.append(WriteItem(index, kind, tensor_data=data))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self._data[write_item.index]
        if isinstance(value, Tensor):
            return value
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return stream


class Reads(DefaultLoadPlanner):
    """The load planner, which takes the data of DCP's reader.

    Attributes:
        items: the read items.
        objects: the values that are not tensors, by key, once read.
        kinds: the dtype and shape of each box in the index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: list[ReadItem] = []
        self.objects: dict[str, Any] = {}
        self.kinds: dict[MetadataIndex, tuple[torch.dtype, Size]] = {}
        self._copies: dict[MetadataIndex, list[tuple[Box, Tensor]]] = {}

    def add_object(self, key: str) -> None:
        """Add a read item for a value that is not a tensor."""
        self._add(LoadItemType.BYTE_IO, MetadataIndex(key), [0], [0])

    def add_tensor(self, key: str, value: Any, saved: TensorStorageMetadata) -> int:
        """Add read items that fill a value's shards from the saved boxes.

        Returns:
            The number of elements for which nothing was saved.
        """
        parts = list(zip(_parts(value), _shards(value), strict=True))
        missing = sum(part.numel() for part, _ in parts)
        for box in saved.chunks:
            copies = [
                (hit, _cut(part, hit))
                for part, shard in parts
                for hit in itertools.product(*map(_overlap, shard, box.offsets, box.sizes))
            ]
            if not copies:
                continue
            missing -= sum(view.numel() for _, view in copies)
            index = MetadataIndex(key, box.offsets)
            self._copies[index] = copies
            self.kinds[index] = saved.properties.dtype, box.sizes
            # The smallest region of the box that has all wanted elements is read once.
            rows = list(zip(*(hit for hit, _ in copies), strict=True))
            low = [min(r.start for r in row) for row in rows]
            high = [max(r.start + r.length for r in row) for row in rows]
            self._add(
                LoadItemType.TENSOR, index, low, [b - a for a, b in zip(low, high, strict=True)]
            )
        return missing

    def _add(
        self, kind: LoadItemType, index: MetadataIndex, low: Sequence[int], lengths: Sequence[int]
    ) -> None:
        item = ReadItem(kind, index, Size([0] * len(low)), index, Size(low), Size(lengths))
        self.items.append(item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.storage_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The tensor into which a region is read: the destination, if there is only one."""
        (_, view), *more = self._copies[read_item.storage_index]
        return torch.empty(read_item.lengths, dtype=view.dtype) if more else view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        copies = self._copies.pop(read_item.storage_index)
        if len(copies) > 1:
            for hit, view in copies:
                inside = zip(hit, read_item.storage_offsets, strict=True)
                view.copy_(
                    _cut(tensor, tuple(IndexRun(0, r.start - low, r.length) for r, low in inside))
                )
