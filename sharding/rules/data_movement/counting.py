"""Indices that count along a dim of the result: lookups and sums that each row does on its own.

``x[arange(n)[:, None], ids]`` reads row i for its row i: the indexed dim and the index's dim are the
same, and can be split together. vmap writes lookups with batched tables so, and per-example gradients of
tables as their transposes. A rank counts the rows that it has, which need not be adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import fx

from torchard.functional.programs.tags import STEP, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, letters, spell

__all__ = ["Indexed", "counted", "counting_dim", "indexed", "local_count"]

_T = TypeVar("_T")

_MOVED = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.alias.default, aten.clone.default, aten.expand.default),
)

_INTEGERS = (torch.int32, torch.int64)


def counted(node: fx.Node, stride: int = 1) -> int | None:
    """The dim along which a value is 0, stride, 2 * stride, ..., the same along all others; or None."""
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return 0 if _steps(node) == (0, stride) else None
    if node.target not in _MOVED and not STEP.on(node) and not _casts_integers(node):
        return None
    (source,) = node.all_input_nodes
    dim, before, after = counted(source, stride), _shape(source), _shape(node)
    if dim is None or before == after:
        return dim
    if node.target is aten.expand.default:
        place = dim + len(after) - len(before)
        return place if after[place] == before[dim] else None
    return after.index(before[dim]) if prod(before) == before[dim] > 1 else None


def _casts_integers(node: fx.Node) -> bool:
    """Whether a node is a cast between integers that count far enough, or a copy to another device."""
    if node.target is not aten._to_copy.default:
        return False
    return all(VAL.of(n).dtype in _INTEGERS for n in (node, *node.all_input_nodes))


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(VAL.of(node).shape)


def _steps(node: fx.Node) -> tuple[object, object]:
    if node.target is aten.arange.default:
        return 0, 1
    return node.args[0], node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)


def counting_dim(call: Call, local: Local, operand: int, axes: Sequence[str]) -> int | None:
    """The dim of an index that counts a dim which these axes split; None for indices that look up.

    An axis splits one factor, so the same axes are on both only if the rule made one factor of both. The
    index itself may be an input here: one that a forward computed.
    """
    dims = range(len(call.ins[operand]))
    return next((d for d in dims if axes and local.operand_axes(operand, d) == tuple(axes)), None)


def local_count(call: Call, local: Local, operand: int, dim: int, stride: int = 1) -> Any:
    """An index that counts by ``stride`` along a dim, restricted to a rank's rows."""
    val, shape = VAL.of(call.operands[operand]), local.operand_shape(operand)
    stop = shape[dim] * stride
    count = local.call(
        aten.arange.start_step, 0, stop, stride, dtype=val.dtype, device=val.device
    )
    beside = [n if d == dim else 1 for d, n in enumerate(shape)]
    return local.call(aten.expand.default, local.call(aten.view.default, count, beside), shape)


@dataclass(frozen=True)
class Indexed:
    """The dims of ``table[..., i, j, ...]``, by name.

    Attributes:
        table: the dims of the table.
        indices: the text of each index.
        picked: the dims of the broadcast indices; an index dim that counts a table dim has its name.
        sizes: the sizes of the picked dims.
        used: the table's dims that are indexed.
        at: the position of the picked dims in the result.
    """

    table: list[str]
    indices: list[str]
    picked: list[str]
    sizes: tuple[int, ...]
    used: list[int]
    at: int

    @property
    def looked_up(self) -> list[str]:
        """The indexed dims that no index counts."""
        return [self.table[d] for d in self.used if self.table[d] not in self.picked]

    @property
    def own(self) -> list[int]:
        """The picked dims that are none of the table's."""
        return [i for i, name in enumerate(self.picked) if name not in self.table]

    def around(self, others: Sequence[_T], picked: Sequence[_T]) -> list[_T]:
        """What belongs to the result's dims, of what belongs to the table's and to the picked ones."""
        rest = [x for d, x in enumerate(others) if d not in self.used]
        return [*rest[: self.at], *picked, *rest[self.at :]]


def indexed(call: Call) -> Indexed | None:
    """How an index or index_put names its dims; None for masks."""
    nodes = {d: i for d, i in enumerate(call.arg(1)) if isinstance(i, fx.Node)}
    if any(VAL.of(i).dtype == torch.bool for i in nodes.values()):
        return None
    used, table = list(nodes), letters(len(call.ins[0]))
    sizes = tuple(torch.broadcast_shapes(*map(_shape, nodes.values())))
    picked = [f"k{i}" for i in range(len(sizes))]
    for d, node in nodes.items():
        dim = counted(node)
        place = None if dim is None else dim + len(sizes) - len(_shape(node))
        if place is not None and picked[place] not in table and call.ins[0][d] == sizes[place] > 1:
            picked[place] = table[d]
    indices = [_index_text(_shape(node), picked, sizes) for node in nodes.values()]
    adjacent = used == list(range(used[0], used[0] + len(used)))
    return Indexed(table, indices, picked, sizes, used, used[0] if adjacent else 0)


def _index_text(shape: tuple[int, ...], picked: list[str], sizes: tuple[int, ...]) -> str:
    missing = len(sizes) - len(shape)
    named = zip(picked[missing:], shape, sizes[missing:], strict=True)
    return spell([name if size == whole else "1" for name, size, whole in named])
