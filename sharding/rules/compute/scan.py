"""Scans and sorts along a dim, which is whole; and ``sums_from``, a cumulative sum from the end.

torch computes the derivative of cumsum as flip, cumsum, flip, which would send every element of a split
dim to the rank at the other end and back. ``sums_from`` replaces all three and, decomposed, needs one
sum from each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, letters, register_rule, spell

__all__ = ["SUMS_FROM", "fold_flips", "sums_from"]


def _sums_from(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


_library = torch.library.Library("torchard", "FRAGMENT")
_library.define("sums_from(Tensor x, int dim) -> Tensor")
_library.impl("sums_from", _sums_from, "CompositeExplicitAutograd")
SUMS_FROM: Any = torch.ops.torchard.sums_from.default
torch.library.register_fake("torchard::sums_from", _sums_from, lib=_library)


def _mapped(info: Any, in_dims: tuple[int, None], x: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    x = x.movedim(in_dims[0], 0)
    return SUMS_FROM(x, dim % (x.ndim - 1) + 1), 0


torch.library.register_vmap("torchard::sums_from", _mapped, lib=_library)


def sums_from(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The cumulative sum from the end of a dim: at each index, the sum from there to the end."""
    result: torch.Tensor = SUMS_FROM(x, dim)
    return result


def fold_flips(graph: fx.Graph) -> None:
    """Replace flip, cumsum, flip along one dim by ``sums_from``; changes the graph in place."""
    for node in list(graph.nodes):
        summed = _summed_from(node)
        if summed is None or VAL.of(summed[0]).dtype != VAL.of(node).dtype:
            continue  # cumsum returns int64 for narrower integers
        substitute(node, Inserter(node)(SUMS_FROM, *summed, same="value"))


def _summed_from(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The operand and dim of flip, cumsum, flip that ends at a node; None for other nodes."""
    last = _flipped(node)
    if last is None or last[0].target is not aten.cumsum.default or last[0].kwargs:
        return None
    source, along = last[0].args
    first = _flipped(source)
    rank = VAL.of(node).ndim
    same = first is not None and isinstance(along, int) and {first[1], along % rank} == {last[1]}
    return first if same else None


def _flipped(node: Any) -> tuple[fx.Node, int] | None:
    """The operand and dim of a flip along one dim; None for other nodes."""
    if not isinstance(node, fx.Node) or node.target is not aten.flip.default:
        return None
    if not VAL.of(node).ndim:
        return None
    (source,), dims = node.all_input_nodes, node.args[1]
    assert isinstance(dims, (list, tuple))
    (dim,) = dims if len(dims) == 1 else (None,)
    return (source, dim % VAL.of(node).ndim) if isinstance(dim, int) else None


def _scan(results: int) -> Any:
    def text(call: Call) -> str:
        names = letters(len(call.ins[0]))
        dim = call.arg(1, "dim", -1) % max(len(names), 1)
        whole = f" | whole {names[dim]}" if names else ""
        return f"{spell(names)} -> {', '.join([spell(names)] * results)}{whole}"

    return text


register_rule(aten.cumsum.default, aten.cumprod.default, SUMS_FROM, text=_scan(1))
register_rule(aten.cummax.default, aten.cummin.default, aten.sort.default, text=_scan(2))
