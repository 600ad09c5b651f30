"""Products of groups of rows with a matrix for each group, as experts compute them.

torch's ``grouped_mm`` has a fake kernel for bfloat16 only, leaves rows of no group as memory was, and
refuses rows that are not aligned, as shards may be. Two operations of our own represent it in programs:
``grouped_mm``, and ``grouped_outer``, the gradient of its matrices. Their groups are adjacent runs of
rows; rows of no group are zero. All groups have a begin and an end, so that a rank may have some of them.
Rows may be in blocks of one size, [blocks, groups] places count from the first row of a block. Groups may
have several owners, each with as many: a leading dim of all operands, with rows for each owner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.torch_internals.operators import aten

__all__ = ["GROUPED_MM", "GROUPED_OUTER", "by_kernel", "outer_by_kernel", "replacement"]

_ALIGNED = 16  # bytes


def _runs(
    begins: torch.Tensor, ends: torch.Tensor, rows: int
) -> Iterator[tuple[int, int, int]]:
    """Each group that has rows, with its first row and the one after its last. Reads values."""
    blocks = begins.reshape(-1, begins.shape[-1]), ends.reshape(-1, ends.shape[-1])
    each = rows // max(len(blocks[0]), 1)
    for block, places in enumerate(zip(*(at.tolist() for at in blocks), strict=True)):
        for group, (start, stop) in enumerate(zip(*places, strict=True)):
            if stop > start:
                yield group, start + block * each, stop + block * each


def _by_owner(op: Any, *args: Any) -> torch.Tensor:
    """The products of all owners, each for its groups."""
    *tensors, groups = args
    parts = [op(*each, groups) for each in zip(*tensors, strict=True)]
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _grouped_mm(
    x: torch.Tensor, w: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, groups: int
) -> torch.Tensor:
    """x [s, k], w [groups, k, n] -> [s, n]."""
    if x.ndim == 3:
        return _by_owner(_grouped_mm, x, w, begins, ends, groups)
    if x.device.type != "cpu" and 0 not in (*x.shape, *w.shape):
        parts = [by_kernel(rows, w, b, e, groups) for rows, b, e in _blocks(x, begins, ends)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    out = x.new_zeros(len(x), w.shape[2])
    for group, start, stop in _runs(begins, ends, len(x)):
        out[start:stop].addmm_(x[start:stop], w[group])
    return out


def _grouped_outer(
    x: torch.Tensor, y: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, groups: int
) -> torch.Tensor:
    """x [s, k], y [s, n] -> [groups, k, n]: the sum of each group's products of rows."""
    if x.ndim == 3:
        return _by_owner(_grouped_outer, x, y, begins, ends, groups)
    if x.device.type != "cpu" and 0 not in (*x.shape, *y.shape, *ends.shape):
        pairs = zip(_blocks(x, begins, ends), _blocks(y, begins, ends), strict=True)
        first, *rest = (
            outer_by_kernel(a, b, begin, end, groups) for (a, begin, end), (b, _, _) in pairs
        )
        return sum(rest, first)
    out = x.new_zeros(ends.shape[-1], x.shape[1], y.shape[1])
    for group, start, stop in _runs(begins, ends, len(x)):
        out[group].addmm_(x[start:stop].t(), y[start:stop])
    return out


def _blocks(
    x: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The rows of each block, and the places of groups among them."""
    if begins.ndim == 1:
        return [(x, begins, ends)]
    return list(zip(x.chunk(len(begins)), begins, ends, strict=True))


# torch's kernel begins at the first row, does not write rows after the last group, and needs the rows or
# the columns of matrices to be aligned in memory.


def by_kernel(
    x: torch.Tensor, w: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, groups: int
) -> torch.Tensor:
    """``grouped_mm`` by torch's kernel."""
    begin = None if len(ends) == groups else begins[:1]
    turned, stop, n = _aligned(_turned(x, begin)), _from(ends, begin), w.shape[2]
    w = torch.nn.functional.pad(w, (0, 0, 0, turned.shape[1] - w.shape[1]))
    out = aten._grouped_mm.default(turned, _aligned(w), stop)
    after = torch.arange(len(x), device=x.device) >= stop[-1]
    out = out[:, :n].masked_fill(after[:, None], 0)
    return _turned(out, None if begin is None else -begin)


def outer_by_kernel(
    x: torch.Tensor, y: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, groups: int
) -> torch.Tensor:
    """``grouped_outer`` by torch's kernel."""
    begin, shape = None if len(ends) == groups else begins[:1], (x.shape[1], y.shape[1])
    x, y = (_aligned(_turned(each, begin)) for each in (x, y))
    product = aten._grouped_mm.default(x.t(), y, _from(ends, begin))[:, : shape[0], : shape[1]]
    outer: torch.Tensor = product.masked_fill((ends <= begins)[:, None, None], 0).contiguous()
    return outer


def _turned(x: torch.Tensor, begin: torch.Tensor | None) -> torch.Tensor:
    """The rows from ``begin`` on, followed by those before it."""
    if begin is None:
        return x
    at = (torch.arange(len(x), device=x.device) + begin) % len(x)
    return x.index_select(0, at)


def _from(ends: torch.Tensor, begin: torch.Tensor | None) -> torch.Tensor:
    return ends if begin is None else ends - begin


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or x with zeros after its columns, so that its rows or its columns are aligned in memory."""
    multiple = _ALIGNED // x.element_size()
    *_, rows, columns = x.shape
    of_rows, of_columns = x.stride()[-2:]
    by_rows = of_columns == 1 and of_rows % multiple == 0 and of_rows >= max(columns, 1)
    by_columns = of_rows == 1 and of_columns % multiple == 0 and of_columns >= max(rows, 1)
    fits = x.data_ptr() % _ALIGNED == 0 and all(n % multiple == 0 for n in x.stride()[:-2])
    if fits and (by_rows or by_columns):
        return x
    return torch.nn.functional.pad(x, (0, -columns % multiple)).contiguous()


LIBRARY = torch.library.Library("torchard", "FRAGMENT")
for _name, _second in (("grouped_mm", "w"), ("grouped_outer", "y")):
    LIBRARY.define(
        f"{_name}(Tensor x, Tensor {_second}, Tensor begins, Tensor ends, int groups) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
LIBRARY.impl("grouped_mm", _grouped_mm, "CompositeExplicitAutograd")
LIBRARY.impl("grouped_outer", _grouped_outer, "CompositeExplicitAutograd")

GROUPED_MM: Any = torch.ops.torchard.grouped_mm.default
GROUPED_OUTER: Any = torch.ops.torchard.grouped_outer.default


def _fake_mm(x: torch.Tensor, w: torch.Tensor, begins: Any, ends: Any, groups: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[-1])


def _fake_outer(
    x: torch.Tensor, y: torch.Tensor, begins: Any, ends: torch.Tensor, groups: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-2], ends.shape[-1], x.shape[-1], y.shape[-1])


torch.library.register_fake("torchard::grouped_mm", _fake_mm, lib=LIBRARY)
torch.library.register_fake("torchard::grouped_outer", _fake_outer, lib=LIBRARY)


# -- derivatives ----------------------------------------------------------------------------------

Derivatives = tuple[Any, Any]


def _of_mm(grad: Any, x: Any, w: Any, *groups: Any, needed: Sequence[bool]) -> Derivatives:
    return (
        GROUPED_MM(grad, w.mT, *groups) if needed[0] else None,
        GROUPED_OUTER(x, grad, *groups) if needed[1] else None,
    )


def _of_outer(grad: Any, x: Any, y: Any, *groups: Any, needed: Sequence[bool]) -> Derivatives:
    return (
        GROUPED_MM(y, grad.mT, *groups) if needed[0] else None,
        GROUPED_MM(x, grad, *groups) if needed[1] else None,
    )


def _one_by_one(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    """vmap, an example after the other: each has groups of its own."""

    def example(i: int) -> Any:
        given = zip(args, in_dims, strict=True)
        return op(*(a if d is None else a.select(d, i) for a, d in given))

    return torch.stack([example(i) for i in range(info.batch_size)]), 0


for _kind, _op, _backward in (
    ("grouped_mm", GROUPED_MM, _of_mm),
    ("grouped_outer", GROUPED_OUTER, _of_outer),
):
    LIBRARY.impl(_kind, internals.bilinear(_op, _backward), "Autograd")
    _mapped = functools.partial(_one_by_one, _op)
    torch.library.register_vmap(f"torchard::{_kind}", _mapped, lib=LIBRARY)


# -- torch's function -----------------------------------------------------------------------------


def _composed(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """torch's grouped_mm; calls that it refuses are left to it."""
    if not _fits(a, b, offs) or bias is not None or out_dtype not in (None, a.dtype):
        return NotImplemented
    if offs is None:
        return torch.bmm(a, b)
    groups = *_between(offs), len(offs)
    if a.ndim == 2 and b.ndim == 2:
        return GROUPED_OUTER(a.t(), b, *groups)
    if a.ndim == 2:
        return GROUPED_MM(a, b, *groups)
    return GROUPED_MM(b.t(), a.transpose(1, 2), *groups).t()


def _between(offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The begins and ends of groups, of which each begins where the one before it ends."""
    return torch.nn.functional.pad(offs[:-1], (1, 0)), offs


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _fits(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> bool:
    """Whether torch takes operands of these shapes and dtypes."""
    if a.dtype != b.dtype or a.dtype not in _DTYPES or not {2, 3}.issuperset((a.ndim, b.ndim)):
        return False
    if a.shape[-1] != b.shape[-2]:
        return False
    grouped = [x.shape[0] for x in (a, b) if x.ndim == 3]
    if len(grouped) == 2:
        return offs is None and grouped[0] == grouped[1]
    if offs is None or offs.ndim != 1 or offs.dtype != torch.int32 or not len(offs):
        return False
    return all(n == len(offs) for n in grouped)


def _fallback(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
    """The operator that HuggingFace's experts call in traces, in dtypes other than bfloat16."""
    return GROUPED_MM(input, weight, *_between(offs), len(offs))


def replacement(func: Any) -> Callable[..., Any] | None:
    """The replacement of a function or of a packet of operators, if it is such a product."""
    if func is internals.grouped_mm:
        return _composed
    is_fallback = type(func) is internals.OpOverloadPacket and str(func) == _FALLBACK
    return _fallback if is_fallback else None


_FALLBACK = "transformers.grouped_mm_fallback"  # by name: transformers is optional
