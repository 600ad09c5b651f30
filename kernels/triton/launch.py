"""Helpers that all kernels share: tensors as rows, sizes of tiles, and launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "LIMITS",
    "Tile",
    "accumulator",
    "cdiv",
    "launch",
    "partials",
    "programs",
    "rows_of",
    "tile",
    "tile_here",
    "tile_of",
    "tiles",
    "total",
    "whole",
    "wide",
]

WARP = 32
# The registers of a multiprocessor, and the number per thread at which half of its threads can run.
_REGISTERS = 1 << 16
_FEW = 64
# The elements that a thread reads at once: 16 bytes of half precision, by one instruction.
_PER_THREAD = 8


@dataclass
class Limits:
    """Limits on the sizes of tiles, in elements; powers of two.

    Attributes:
        tile: the largest part of each operand that a program holds at a time.
        columns: the largest part of one row in it, where rows may be divided.
        whole: the longest row that is held as a whole.
        block: the part of a longer row that is held at a time; smaller, since there are several values.
    """

    tile: int = 2048
    columns: int = 1024
    whole: int = 16384
    block: int = 8192


LIMITS = Limits()


@dataclass(frozen=True)
class Tile:
    """A tile of rows × block elements, and the number of warps that work on it."""

    rows: int
    block: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The tile as constants of a launch."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(rows: int, d: int) -> Tile:
    """A tile of whole rows of length d: as many as fit, but at least one."""
    block = _power(d)
    rows = min(_power(rows), max(1, LIMITS.tile // block))
    return Tile(rows, block, min(32, max(4, rows * block // (_PER_THREAD * WARP))))


def tile(x: Tensor) -> Tile:
    """The tile of x [n, d], where rows may be divided, that wastes least at the end of a row."""
    n, d = x.shape
    widest = min(LIMITS.columns, _power(d))
    blocks = [widest >> i for i in range(3) if widest >> i >= min(256, widest)]
    return tile_of(n, min(blocks, key=lambda block: (cdiv(d, block) * block, -block)))


def whole(n: int, d: int) -> Tile:
    """The tile of [n, d] in which rows are whole, or a block of one row if rows are too long."""
    return tile_of(n, d) if d <= LIMITS.whole else Tile(1, LIMITS.block, 32)


def rows_of(x: Tensor) -> Tensor:
    """Reshape x [..., d] to [n, d] with contiguous rows, by a view where that is possible."""
    d = x.shape[-1] if x.ndim else 1
    rows = x.reshape(math.prod(x.shape[:-1]), d)
    return rows if rows.stride(1) == 1 or d == 1 else rows.contiguous()


def accumulator(*tensors: Tensor) -> Any:
    """The Triton dtype to compute in."""
    return tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32


def wide(acc: Any) -> torch.dtype:
    """The torch dtype of an accumulator."""
    return torch.float64 if acc == tl.float64 else torch.float32


def programs(
    x: Tensor, tile: Tile, columns: int = 1, registers: int = _FEW
) -> tuple[int, dict[str, int]]:
    """The number of programs that run at once, each looping over rows of x [n, d], and launch options.

    The options limit the registers per thread so that all of them fit. One program more would start
    when the others end, and take as long again.

    Args:
        columns: the number of programs for one set of rows.
        registers: the largest number of registers per thread.
    """
    threads = tile.warps * WARP
    registers = min(registers, _REGISTERS // threads)
    at_once = 3  # without a CUDA device, in Triton's interpreter
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        at_once = processors * (_REGISTERS // (registers * threads))
    count = max(1, min(cdiv(x.shape[0], tile.rows), at_once // max(1, columns)))
    return count, {"maxnreg": registers}


def tiles(x: Tensor, tile: Tile) -> tuple[int]:
    """The grid with one program for each tile of x [n, d], as `tile_here` expects it."""
    n, d = x.shape
    return (cdiv(n, tile.rows) * cdiv(d, tile.block),)


@triton.jit
def tile_here(n, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows [ROWS, 1] and columns [1, BLOCK] of this program's tile, and which are inside [n, d].

    Neighbouring programs have tiles of the same rows, so that together they read contiguous memory. Rows
    are int64, so that offsets are.
    """
    across = tl.cdiv(d, BLOCK)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    cols = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, cols, (rows < n) & (cols < d)


def partials(count: int, like: Tensor, acc: Any) -> Tensor:
    """An uninitialised buffer [count, d] for partial sums over the rows of a tensor [n, d]."""
    return like.new_empty((count, like.shape[1]), dtype=wide(acc))


def total(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of partial sums [count, d], [d]: the second step of a sum over rows."""
    return partial.sum(0).to(dtype)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, on: Tensor, **constants: Any) -> None:
    """Launch a kernel on the device of a tensor, unless the grid is empty."""
    if math.prod(grid):
        with torch.cuda.device_of(on):
            # Explicit, since Triton is going to change the default.
            kernel[grid](*args, **constants, enable_fp_fusion=True)
