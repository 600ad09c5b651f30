"""A write in place of a value in another order than its copy would have: results are laid out as before.

`scatter_add` of a transposed value returns a contiguous one, and later operations were traced with that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchard import jit

AT = torch.tensor([2])
ROWS = torch.full((4, 4), 1)
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scatter": lambda z, o: z.scatter(0, ROWS, o),
    "scatter_add": lambda z, o: z.scatter_add(0, ROWS, o),
    "scatter_reduce": lambda z, o: z.scatter_reduce(0, ROWS, o, "amax"),
    "index_add": lambda z, o: z.index_add(0, AT, o[:1]),
    "index_copy": lambda z, o: z.index_copy(0, AT, o[:1]),
    "index_fill": lambda z, o: z.index_fill(0, AT, 3),
    "index_put": lambda z, o: z.index_put((AT,), o[:1]),
    "index_reduce": lambda z, o: z.index_reduce(0, AT, o[:1], "amax"),
    "masked_fill": lambda z, o: z.masked_fill(o > 2, 3),
    "masked_scatter": lambda z, o: z.masked_scatter(o > 2, o),
    "put": lambda z, o: z.put(AT, o[0, :1]),
    "select_scatter": lambda z, o: z.select_scatter(o[0], 0, 1),
    "slice_scatter": lambda z, o: z.slice_scatter(o[:2], 0, 1, 3),
    "diagonal_scatter": lambda z, o: z.diagonal_scatter(o[0]),
    "copy": lambda z, o: torch.ops.aten.copy.default(z, o),
    "clone": lambda z, o: z.clone(memory_format=torch.contiguous_format),
}
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: (y * 2).t(),
    "expanded": lambda y: (y[0] * 2).expand(4, 4),
    "every other column": lambda y: (torch.cat([y, y], 1) * 2)[:, ::2],
}


@pytest.mark.parametrize("memory", ["allocated", "planned"])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_results_are_laid_out_as_out_of_place(
    write: Callable[[Tensor, Tensor], Tensor], base: Callable[[Tensor], Tensor], memory: str
) -> None:
    def fn(y: Tensor) -> tuple[Tensor, ...]:
        z = write(base(y), y)
        return z, z.reshape(-1), z.contiguous().view(-1)

    y = torch.arange(16.0).view(4, 4)
    have, want = jit(fn, backend="eager", memory=memory)(y), fn(y)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    assert [a.stride() for a in have] == [b.stride() for b in want]
