"""Running along a dim, which is whole; sums from the end, as the derivative of a running sum needs them.

Torch writes that derivative as a flip, a running sum and a flip, which would send every element of a
split dim to the other end and back. ``sums_from`` is the three in one: it needs a sum from each rank.
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


def sums_from(x: torch.Tensor, dim: int) -> torch.Tensor:
    """At each place of a dim, the sum from there to the end."""
    made: torch.Tensor = SUMS_FROM(x, dim)
    return made


def fold_flips(graph: fx.Graph) -> None:
    """Running sums between two flips of their dim become sums from the end."""
    for node in list(graph.nodes):
        found = _summed_from(node)
        if found is None or VAL.of(found[0]).dtype != VAL.of(node).dtype:
            continue  # sums of integers are wider
        substitute(node, Inserter(node)(SUMS_FROM, *found, same="value"))


def _summed_from(node: fx.Node) -> tuple[fx.Node, int] | None:
    """What a node sums from the end, and along which dim."""
    last = _flipped(node)
    if last is None or last[0].target is not aten.cumsum.default or last[0].kwargs:
        return None
    source, along = last[0].args
    first = _flipped(source)
    rank = VAL.of(node).ndim
    same = first is not None and isinstance(along, int) and {first[1], along % rank} == {last[1]}
    return first if same else None


def _flipped(node: Any) -> tuple[fx.Node, int] | None:
    """What is flipped, along which dim; None if it is not flipped along one."""
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
