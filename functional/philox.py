"""Philox4x64-10: random words as a pure function of (key, word index).

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A key is two
64-bit integers. Word `i` of a key's stream is a half (low first) of one of the four 64-bit results
of the block cipher applied to the counter `(i // 8, 0, 0, 0)`, so any block of an array of words can be
computed without the words before it, on any device, with the same result.

On CPU the words come from numpy's compiled Philox, whose raw stream numpy promises never to change
(NEP 19); elsewhere from the same cipher in torch's integer ops, vectorized over keys and counters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["block_cpu", "block_torch", "philox4x64"]

Words = npt.NDArray[np.uint32]
Box = tuple[list[int], list[int], list[int]]

# Words drawn at a time: they and their int64 copies fit into the second-level cache.
CHUNK = 1 << 15
# Repositioning the generator costs as much as drawing about this many words, so the words of a smaller
# gap between two runs are drawn and discarded.
GAP = 1 << 11
WORDS_PER_COUNTER = 8

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW = 0xFFFFFFFF
LAST = (1 << 64) - 1


def _merge_whole_dims(size: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> Box:
    """The same block, with trailing dims that it covers entirely merged into the dim before them."""
    sizes, starts, stops = [1, *size], [0, *start], [1, *stop]
    while len(sizes) > 1 and (starts[-1], stops[-1]) == (0, sizes[-1]):
        inner = sizes.pop()
        starts.pop()
        stops.pop()
        sizes[-1], starts[-1], stops[-1] = sizes[-1] * inner, starts[-1] * inner, stops[-1] * inner
    return sizes, starts, stops


class _Stream:
    """The stream of words of `key` on CPU, at any position; the key can be changed."""

    def __init__(self) -> None:
        self.key = np.zeros(2, dtype=np.int64)
        self._bits = np.random.Philox(0)
        self._counter = np.zeros(4, dtype=np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self.key.view(np.uint64)},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def words(self, first: int, count: int) -> Words:
        block, skip = divmod(first, WORDS_PER_COUNTER)
        # numpy adds one to the 256-bit counter before it uses it.
        self._counter[:] = (block - 1, 0, 0, 0) if block else (LAST,) * 4
        self._bits.state = self._state
        raw: npt.NDArray[np.uint64] = self._bits.random_raw((skip + count + 1) // 2)
        return raw.astype("<u8", copy=False).view("<u4")[skip : skip + count]

    def fill(self, out: npt.NDArray[np.int64], first: int, box: Box) -> None:
        """Write a block of an array to out [*(stop - start)]; the array begins at word `first`."""
        size, start, stop = box
        pitch = math.prod(size[1:])
        if len(size) > 1 and pitch > GAP:
            for i in range(start[0], stop[0]):
                inner = size[1:], start[1:], stop[1:]
                self.fill(out[i - start[0]], first + i * pitch, inner)
            return
        rows = max(1, CHUNK // pitch)
        strides = [4 * math.prod(size[d + 1 :]) for d in range(len(size))]
        inset = sum(s * stride // 4 for s, stride in zip(start[1:], strides[1:], strict=True))
        for i in range(start[0], stop[0], rows):
            part = out[i - start[0] : i - start[0] + rows]
            span = 1 + sum((n - 1) * s // 4 for n, s in zip(part.shape, strides, strict=True))
            drawn = self.words(first + i * pitch + inset, span)
            part[...] = np.ndarray(part.shape, np.uint32, drawn, strides=strides)


def block_cpu(
    key: Tensor, size: Sequence[int], start: Sequence[int], stop: Sequence[int]
) -> Tensor:
    """A block of words, int64 [*batch, *(stop - start)] in [0, 2^32), of keys [*batch, 2] on CPU."""
    shape = [e - s for s, e in zip(start, stop, strict=True)]
    box = _merge_whole_dims(size, start, stop)
    merged = [e - s for s, e in zip(box[1], box[2], strict=True)]
    keys = key.reshape(-1, 2).tolist()
    out = np.empty((len(keys), *merged), dtype=np.int64)
    if out.size:
        stream = _Stream()
        for row, words in zip(keys, out, strict=True):
            stream.key[:] = row
            stream.fill(words, 0, box)
    return torch.from_numpy(out).reshape([*key.shape[:-1], *shape])


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _high_half(x: Tensor, multiplier: int) -> Tensor:
    """Bits 64 to 127 of the unsigned product, from 32-bit halves: torch's int64 is signed."""
    x0, x1 = x & LOW, (x >> 32) & LOW
    m0, m1 = multiplier & LOW, multiplier >> 32
    low, mid0, mid1 = x0 * m0, x1 * m0, x0 * m1
    carry = ((low >> 32) & LOW) + (mid0 & LOW) + (mid1 & LOW)
    return x1 * m1 + ((mid0 >> 32) & LOW) + ((mid1 >> 32) & LOW) + (carry >> 32)


def philox4x64(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = 10) -> list[Tensor]:
    """The block cipher, on four counter words and two key words that broadcast together.

    Words are unsigned 64-bit numbers held in int64 tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(rounds):
        if turn:
            k0, k1 = k0 + _signed(WEYL[0]), k1 + _signed(WEYL[1])
        h0, l0 = _high_half(c0, MULTIPLIERS[0]), c0 * _signed(MULTIPLIERS[0])
        h1, l1 = _high_half(c2, MULTIPLIERS[1]), c2 * _signed(MULTIPLIERS[1])
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
    return [c0, c1, c2, c3]


def _run_starts(box: Box, device: torch.device) -> Tensor:
    """Linear index of the first word of each contiguous run of the block, [runs]."""
    size, start, stop = box
    first = torch.full((1,), start[-1], dtype=torch.int64, device=device)
    for d in reversed(range(len(size) - 1)):
        rows = torch.arange(start[d], stop[d], device=device) * math.prod(size[d + 1 :])
        first = (rows[:, None] + first).reshape(-1)
    return first


def block_torch(
    key: Tensor, size: Sequence[int], start: Sequence[int], stop: Sequence[int]
) -> Tensor:
    """`block_cpu` in torch ops, on the key's device."""
    shape = [e - s for s, e in zip(start, stop, strict=True)]
    if 0 in shape:
        return key.new_empty((*key.shape[:-1], *shape))
    box = _merge_whole_dims(size, start, stop)
    first = _run_starts(box, key.device)
    length = box[2][-1] - box[1][-1]
    spans = 1 if length == math.prod(size) else 2
    counters = torch.arange(-(-length // WORDS_PER_COUNTER) + spans - 1, device=key.device)
    blocks = torch.div(first, WORDS_PER_COUNTER, rounding_mode="floor")[:, None] + counters
    zero = torch.zeros_like(blocks)
    k0, k1 = (key[..., i].reshape(-1, 1, 1) for i in range(2))
    lanes = torch.stack(philox4x64([blocks, zero, zero, zero], [k0, k1]), -1)
    halves = torch.stack([lanes & LOW, (lanes >> 32) & LOW], -1).flatten(2)
    offset = (first % WORDS_PER_COUNTER)[:, None] + torch.arange(length, device=key.device)
    words = halves.gather(2, offset.expand(len(k0), -1, -1))
    return words.reshape([*key.shape[:-1], *shape])
