"""What all kernels share: tensors as rows, sizes of tiles, and launches."""

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
# Of a multiprocessor, and what a thread may have of them so that half of the threads it holds work.
_REGISTERS = 1 << 16
_FEW = 64
# A program reads this many elements per thread: 16 bytes of a half precision, one instruction.
_PER_THREAD = 8


@dataclass
class Limits:
    """Sizes in elements, powers of two.

    Attributes:
        tile: what a program holds of each operand at a time.
        columns: of that, how much of one row, where rows need not be whole.
        whole: the longest row that is held as a whole.
        block: of longer ones, how much at a time, where several things are held.
    """

    tile: int = 2048
    columns: int = 1024
    whole: int = 16384
    block: int = 8192


LIMITS = Limits()


@dataclass(frozen=True)
class Tile:
    """rows × block elements, and the warps that work on them."""

    rows: int
    block: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(rows: int, d: int) -> Tile:
    """As much of rows of a length as fits, at least one of them."""
    block = _power(d)
    rows = min(_power(rows), max(1, LIMITS.tile // block))
    return Tile(rows, block, min(32, max(4, rows * block // (_PER_THREAD * WARP))))


def tile(x: Tensor) -> Tile:
    """Of x [n, d], where a row may be in several tiles: those that leave least of the last one idle."""
    n, d = x.shape
    widest = min(LIMITS.columns, _power(d))
    blocks = [widest >> i for i in range(3) if widest >> i >= min(256, widest)]
    return tile_of(n, min(blocks, key=lambda block: (cdiv(d, block) * block, -block)))


def whole(n: int, d: int) -> Tile:
    """Of [n, d], where a row is held as a whole, or gone through in blocks if it is too long."""
    return tile_of(n, d) if d <= LIMITS.whole else Tile(1, LIMITS.block, 32)


def rows_of(x: Tensor) -> Tensor:
    """[..., d] -> [n, d] with the elements of a row side by side: a view wherever there is one."""
    d = x.shape[-1] if x.ndim else 1
    rows = x.reshape(math.prod(x.shape[:-1]), d)
    return rows if rows.stride(1) == 1 or d == 1 else rows.contiguous()


def accumulator(*tensors: Tensor) -> Any:
    """What is computed in."""
    return tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32


def wide(acc: Any) -> torch.dtype:
    """The same as torch's."""
    return torch.float64 if acc == tl.float64 else torch.float32


def programs(
    x: Tensor, tile: Tile, columns: int = 1, registers: int = _FEW
) -> tuple[int, dict[str, int]]:
    """As many as run at a time, each of which goes on over rows of x [n, d] in so many columns.

    And what a launch has to say for that: registers per thread. One program more than fit would wait
    for the others, and take as long as they did.
    """
    threads = tile.warps * WARP
    registers = min(registers, _REGISTERS // threads)
    at_once = 3  # where there is no such device (in Triton's interpreter)
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        at_once = processors * (_REGISTERS // (registers * threads))
    count = max(1, min(cdiv(x.shape[0], tile.rows), at_once // max(1, columns)))
    return count, {"maxnreg": registers}


def tiles(x: Tensor, tile: Tile) -> tuple[int]:
    """As many programs as x [n, d] has tiles, for `tile_here`."""
    n, d = x.shape
    return (cdiv(n, tile.rows) * cdiv(d, tile.block),)


@triton.jit
def tile_here(n, d, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, 1] and columns [1, BLOCK] of this program's tile, and which are inside [n, d].

    Neighbours have tiles of the same rows: together they read what lies together. Rows are of 64 bits,
    so that offsets are.
    """
    across = tl.cdiv(d, BLOCK)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    cols = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    return rows, cols, (rows < n) & (cols < d)


def partials(count: int, like: Tensor, acc: Any) -> Tensor:
    """[programs, d] for sums over rows of what is like [n, d]."""
    return like.new_empty((count, like.shape[1]), dtype=wide(acc))


def total(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """[programs, d] -> [d]: the second step of a sum over rows."""
    return partial.sum(0).to(dtype)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, on: Tensor, **constants: Any) -> None:
    """Run a kernel on the device of a tensor; nothing, if there is nothing to do."""
    if math.prod(grid):
        with torch.cuda.device_of(on):
            # Said, since Triton is going to change what it is by default.
            kernel[grid](*args, **constants, enable_fp_fusion=True)
