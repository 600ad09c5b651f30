"""Operations that round nothing, because they compute nothing: they move or select values."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchard.functional.costs.flops import op_name
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view

__all__ = ["counts", "literals", "moves", "rearranges"]

# Operations that move values, in a way that does not depend on the values.
_REARRANGES = frozenset(
    f"aten.{name}"
    for name in (
        *("cat", "clone", "constant_pad_nd", "embedding", "flip", "gather", "index", "index_select"),
        *("repeat", "roll", "select_scatter", "slice_scatter", "stack"),
    )
)

# Operations whose results are elements of their operands, perhaps negated. An operation that is missing
# here and above counts one rounding too many. If the results of amax were perturbed, no element of the
# operand would equal the maximum, and gradients, which look for the equal element, would be NaN.
_SELECTS = frozenset(
    f"aten.{name}"
    for name in (
        *("abs", "amax", "amin", "aminmax", "clamp", "clamp_max", "clamp_min", "cummax", "cummin"),
        *("fmax", "fmin", "kthvalue", "masked_fill", "max", "max_pool2d_with_indices", "maximum"),
        *("median", "min", "minimum", "neg", "relu", "sort", "threshold_backward", "topk", "tril"),
        *("triu", "where"),
    )
)

# Operations whose results are integers, which are not rounded.
_COUNTS = frozenset(f"aten.{name}" for name in ("ceil", "floor", "round", "sgn", "sign", "trunc"))

# Operations that select or compute, depending on the argument ``reduce``; the numbers are its positions.
_REDUCES = {"aten.scatter_reduce": 4, "aten.index_reduce": 4}


def rearranges(node: fx.Node) -> bool:
    """Whether an operation only moves values, whatever they are."""
    return is_view(node) or op_name(node) in _REARRANGES


def moves(node: fx.Node) -> bool:
    """Whether all elements of an operation's results are elements of operands, or literals."""
    name = op_name(node)
    if name == "aten.abs" and _of_complex(node):
        return False
    if name in _REDUCES:
        return _argument(node, "reduce", _REDUCES[name]) in ("amax", "amin")
    return rearranges(node) or name in _SELECTS


def counts(node: fx.Node) -> bool:
    """Whether all of an operation's results are integers, which roundings move by 0 or at least 1."""
    return op_name(node) in _COUNTS and len(node.args) + len(node.kwargs) == 1 and not _of_complex(node)


def literals(node: fx.Node) -> list[float]:
    """The floating numbers among a call's arguments."""
    return [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, float)]


def _of_complex(node: fx.Node) -> bool:
    return any(VAL.of(source).is_complex() for source in node.all_input_nodes)


def _argument(node: fx.Node, name: str, position: int) -> Any:
    return node.kwargs[name] if name in node.kwargs else node.args[position]
