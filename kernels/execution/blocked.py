"""The operations themselves, over one block of rows at a time: what lies between them stays in a cache.

On a CPU every operation of a chain over a large tensor reads and writes memory, and a fresh buffer costs
more than filling it: its pages have to be mapped. Rows that the dims say are independent may as well
run one block after another. A block's values are written where they belong; what has no rows, the
gradient of a weight or a bias, is summed up over the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.kernels.execution.buffers import Buffers
from torchard.kernels.terms.dims import Dims

__all__ = ["RowLayout", "blocked"]

# Elements of the largest operand in a block, per thread: they fit a cache, and are worth their calls.
BLOCK = 1 << 17

Run = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
Bound = Callable[[Tensors, bool], Run]


@dataclass(frozen=True)
class RowLayout:
    """What has rows.

    Attributes:
        inputs, outputs: for each, how many of its first dims are rows; None: it has none.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @staticmethod
    def of(dims: Dims, tensors: Tensors) -> RowLayout | None:
        """By the dims; None where they do not say that rows are independent, or rows are not first."""
        longest = max(dims.inputs, key=len)
        first = next((n for n in longest if not n.isdigit()), None)
        if first is None or first in dims.whole:
            return None
        for names in (*dims.inputs, *dims.outputs):
            if first in names[1:]:
                return None
        extra = next(
            t.dim() - len(n) + 1 for t, n in zip(tensors, dims.inputs, strict=True) if first in n
        )
        count = extra if first == "..." else 1
        if not count:
            return None
        inputs, outputs = (
            tuple(count if first in names else None for names in side)
            for side in (dims.inputs, dims.outputs)
        )
        return RowLayout(inputs, outputs)


def blocked(bound: Bound, layout: RowLayout, tensors: Tensors, results: Tensors) -> Run | None:
    """A function of such tensors; None where blocks are not views or there is only one.

    Args:
        bound: of a block's tensors, the places of its results behind them, and whether it is as high as
            most are: what runs on these and writes there.
        results: like what is returned.
    """
    with_rows = [
        (like, n)
        for like, n in zip((*tensors, *results), (*layout.inputs, *layout.outputs), strict=True)
        if n is not None
    ]
    if not with_rows or not all(like.is_contiguous() for like, _ in with_rows):
        return None
    sums = [like for like, n in zip(results, layout.outputs, strict=True) if n is None]
    if any(like.dtype not in (torch.float32, torch.float64) for like in sums):
        return None  # a sum of rounded sums, or no sum at all
    first, count = with_rows[0]
    rows, largest = math.prod(first.shape[:count]), max(like.numel() for like, _ in with_rows)
    blocks = largest // (BLOCK * torch.get_num_threads())
    if min(blocks, rows) < 2:
        return None
    return _Blocked(bound, layout, Buffers.of(results), rows, -(-rows // min(blocks, rows)))


@dataclass(frozen=True)
class _Blocked:
    """See above. step: rows of a block."""

    bound: Bound
    layout: RowLayout
    results: Buffers
    rows: int
    step: int
    runs: dict[int, Run] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        made = self.results.new(tensors[0].device)
        for sums in (m for m, n in zip(made, self.layout.outputs, strict=True) if n is None):
            sums.zero_()
        layout = (*self.layout.inputs, *self.layout.outputs)
        cut = [self._cut(t, n) for t, n in zip((*tensors, *made), layout, strict=True)]
        for number, given in enumerate(zip(*cut, strict=True)):
            rows = min(self.step, self.rows - number * self.step)
            run = self.runs.get(rows)
            if run is None:
                run = self.runs[rows] = self.bound(given, rows == self.step)
            run(list(given))
        return made[0] if len(made) == 1 else tuple(made)

    def _cut(self, tensor: torch.Tensor, count: int | None) -> Sequence[torch.Tensor]:
        """By blocks; what has no rows is in all of them."""
        if count is None:
            return [tensor] * -(-self.rows // self.step)
        rows = tensor.view(self.rows, *tensor.shape[count:])
        return torch.split(rows, self.step)
