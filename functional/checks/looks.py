"""Looks at what an operation with the tag `CHECKS` is given, and at what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import CheckError
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.costs.flops import op_name
from torchard.functional.effects.in_place import WRITTEN_VIEWS
from torchard.functional.programs.tags import CHECKS, VAL, Checks
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten

__all__ = ["Examined", "Within", "checks_in", "indices_of", "is_unset", "wrong"]


class Examined:
    """A look at what an operation returned.

    Args:
        node: an operation with the tag `CHECKS`.
    """

    def __init__(self, node: fx.Node) -> None:
        self.checks, self.op = CHECKS.of(node), op_name(node)

    def __call__(self, result: Any, operands: Sequence[Any]) -> None:
        """Look at a result.

        Raises:
            CheckError: it has NaN, or infinities, that are looked for.
        """
        for x in result if isinstance(result, (tuple, list)) else [result]:
            seen = wrong(x, self.checks)
            if seen is None:
                continue
            found, kind = seen
            first = found.nonzero()[0].tolist()
            raise CheckError(
                f"{self.op} returned {kind} at {first}, {int(found.sum())} of {x.numel()} values, of "
                f"{_kind_of(list(_tensors(operands)))}"
            )


def checks_in(graph: fx.Graph) -> Checks | None:
    """All that is looked for in what a graph computes; None if nothing is."""
    found: Checks | None = None
    for node in graph.nodes:
        if CHECKS.on(node):
            found = CHECKS.of(node).and_those(found)
    return found


def wrong(x: Any, checks: Checks) -> tuple[torch.Tensor, str] | None:
    """Which values are wrong, and what they are; None if there are none."""
    if not is_inexact(x) or isinstance(x, internals.FakeTensor) or not x.numel():
        return None
    for looks, kind, find in ((checks.nan, "NaN", torch.isnan), (checks.inf, "infinity", torch.isinf)):
        if looks and bool((found := find(x.float() if x.itemsize == 1 else x)).any()):  # float8
            return found, kind
    return None


def _kind_of(operands: Sequence[torch.Tensor]) -> str:
    """What operands an operation had, in messages."""
    floats = [x for x in operands if is_inexact(x)]
    if any(bool(x.isnan().any()) for x in floats):
        return "operands with NaN"
    return "operands with infinities" if any(bool(x.isinf().any()) for x in floats) else "finite operands"


def _tensors(operands: Any) -> Iterator[torch.Tensor]:
    for x in operands:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


@dataclass(frozen=True)
class Within:
    """The identity of an index, which must be within a dim.

    Attributes:
        size: the size of the dim.
        wraps: whether negative ones count from the end.
        op: the operation that reads the index.
    """

    size: int
    wraps: bool
    op: str

    __name__ = "within"

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        """The index.

        Raises:
            CheckError: it is not within the dim.
        """
        if isinstance(index, internals.FakeTensor) or index.dtype == torch.bool:
            return index
        found = (index < (-self.size if self.wraps else 0)) | (index >= self.size)
        if bool(found.any()):
            first = found.nonzero()[0].tolist()
            raise CheckError(
                f"{self.op} was given index {int(index[tuple(first)])} at {first}, {int(found.sum())} of "
                f"{index.numel()} indices, of a dim of {self.size}"
            )
        return index


def indices_of(node: fx.Node) -> list[tuple[fx.Node, Within]]:
    """The operands of an operation that are indices, and within what they must be."""
    op, given = op_name(node), cast("Sequence[Any]", node.args)
    sizes = getattr(VAL.get(given[0]), "shape", None) if given and isinstance(given[0], fx.Node) else None
    if sizes is None:
        return []
    match op:
        case "aten.index" | "aten.index_put" | "aten._unsafe_index" | "aten._unsafe_index_put":
            read = [(index, i, True) for i, index in enumerate(given[1])]
            if any(_is_mask(index) for index in given[1]):  # which may be of several dims
                return []
        case "aten.embedding":
            read = [(given[1], 0, False)]
        case "aten.embedding_dense_backward":
            return [(given[1], Within(given[2], False, op))]
        case _ if op in _ALONG and len(sizes):
            read = [(given[2], given[1], op == "aten.index_fill")]
        case _:
            read = []
    return [
        (index, Within(sizes[dim], wraps, op))
        for index, dim, wraps in read
        if isinstance(index, fx.Node)
    ]


def is_unset(node: fx.Node) -> bool:
    """Whether there is nothing to look at: a constant, or memory of which a part was never written."""
    if not node.all_input_nodes:
        return True
    base: Any = node
    while isinstance(base, fx.Node) and (is_view(base) or base.target in _PARTS):
        base = base.args[0]
    return isinstance(base, fx.Node) and op_name(base) in _UNSET


_UNSET = frozenset(
    f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
# Writes to a part of their first operand.
_PARTS = (*WRITTEN_VIEWS, aten.as_strided_scatter.default, aten.index_put.default)


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and getattr(VAL.get(index), "dtype", None) == torch.bool


# Operations of (x, dim, index, ...).
_ALONG = frozenset(
    f"aten.{name}"
    for name in (
        *("gather", "scatter", "scatter_add", "scatter_reduce"),
        *("index_select", "index_add", "index_copy", "index_fill"),
    )
)
