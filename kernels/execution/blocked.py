"""Operations over one block of rows at a time, so that intermediate values stay in a cache.

On a CPU every operation of a chain over a large tensor reads and writes memory, and mapping the pages of
a new buffer costs more than filling it. Rows that are independent by the dims can run one block after
another. The results of a block are written in place; results without rows, such as the gradient of a
weight or a bias, are summed over the blocks.
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

# Elements of the largest operand in a block, per thread: they fit a cache and amortise the calls.
BLOCK = 1 << 17

Run = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
Bound = Callable[[Tensors, bool], Run]


@dataclass(frozen=True)
class RowLayout:
    """The inputs and outputs that have rows.

    Attributes:
        inputs, outputs: the number of leading dims that are rows, for each; None if it has no rows.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @staticmethod
    def of(dims: Dims, tensors: Tensors) -> RowLayout | None:
        """The layout by the dims; None if rows are not independent by them, or not leading."""
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
    """A function of such tensors, run in blocks; None if blocks are not views or there is only one.

    Args:
        bound: binds a block's tensors followed by its results, and whether it has the usual height, to a
            function that computes them in place.
        results: tensors like the results.
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
        return None  # the result would be a sum of rounded sums, or none
    first, count = with_rows[0]
    rows, largest = math.prod(first.shape[:count]), max(like.numel() for like, _ in with_rows)
    blocks = largest // (BLOCK * torch.get_num_threads())
    if min(blocks, rows) < 2:
        return None
    return _Blocked(bound, layout, Buffers.of(results), rows, -(-rows // min(blocks, rows)))


@dataclass(frozen=True)
class _Blocked:
    """The function that `blocked` returns. step: the number of rows in a block."""

    bound: Bound
    layout: RowLayout
    results: Buffers
    rows: int
    step: int
    runs: dict[int, Run] = field(default_factory=dict)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        results = self.results.new(tensors[0].device)
        for sums in (m for m, n in zip(results, self.layout.outputs, strict=True) if n is None):
            sums.zero_()
        layout = (*self.layout.inputs, *self.layout.outputs)
        cut = [self._cut(t, n) for t, n in zip((*tensors, *results), layout, strict=True)]
        for number, given in enumerate(zip(*cut, strict=True)):
            rows = min(self.step, self.rows - number * self.step)
            run = self.runs.get(rows)
            if run is None:
                run = self.runs[rows] = self.bound(given, rows == self.step)
            run(list(given))
        return results[0] if len(results) == 1 else tuple(results)

    def _cut(self, tensor: torch.Tensor, count: int | None) -> Sequence[torch.Tensor]:
        """The blocks of a tensor; a tensor without rows is in all blocks."""
        if count is None:
            return [tensor] * -(-self.rows // self.step)
        rows = tensor.view(self.rows, *tensor.shape[count:])
        return torch.split(rows, self.step)
