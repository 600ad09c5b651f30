"""The collectives of a compiled XLA program, from its text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["Sent", "collectives"]

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
_LINE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*?)\)(.*)")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}


@dataclass(frozen=True)
class Sent:
    """One collective: its kind, and the bytes that each rank sends under the ring algorithm."""

    kind: str
    bytes: float


def collectives(text: str, ranks: int) -> list[Sent]:
    """The collectives of a program on so many ranks; those of one rank send nothing and are left out."""
    found = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            result, kind, _, rest = match.groups()
            size = sum(_size(dtype, dims) for dtype, dims in _SHAPE.findall(result))
            group = ranks if kind == "collective-permute" else _group(rest, ranks)
            if group > 1:
                found.append(Sent(KINDS[kind], _ring(KINDS[kind], size, group)))
    return found


def _size(dtype: str, dims: str) -> int:
    return _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)


def _ring(kind: str, result: int, ranks: int) -> float:
    """Bytes per rank, from those of the result (Patarasuk & Yuan 2009)."""
    return {
        "all_reduce": 2 * result * (ranks - 1) / ranks,
        "all_gather": result * (ranks - 1) / ranks,
        "psum_scatter": result * (ranks - 1),
        "all_to_all": result * (ranks - 1) / ranks,
        "ppermute": result,
    }[kind]


def _group(rest: str, ranks: int) -> int:
    """The number of ranks in a group, from any of XLA's three ways of writing groups."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    return ranks
