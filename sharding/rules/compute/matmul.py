"""Contractions: products of matrices and vectors, which sum over one factor.

In products of groups of rows, with a matrix for each, rows stay where they are: a rank with some of the
rows has begins and ends of the groups counted from its first row. A rank with some of the groups computes
their rows and has zeros for all others, so results add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchard.functional.effects.grouped_products import GROUPED_MM, GROUPED_OUTER
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, Local, register_rule

register_rule(aten.mm.default, text="i k, k j -> i j | linear 0 | linear 1")
register_rule(aten.bmm.default, text="b i k, b k j -> b i j | linear 0 | linear 1")
register_rule(aten.mv.default, text="i k, k -> i | linear 0 | linear 1")
register_rule(aten.dot.default, aten.vdot.default, text="k, k -> | linear 0 | linear 1")


def _addmm(call: Call) -> str:
    """``bias + a @ b``: k is whole, as each shard of a split k would add the bias.

    Where k is split, the operation is decomposed (``functional_forms.py``).
    """
    bias = call.ins[0]
    i, j = call.outs[0]
    names = ["i" if n == i else "1" for n in bias[:-1]] + ["j" if bias and bias[-1] == j else "1"]
    if len(bias) == 2 and bias[0] != i:
        names[0] = "1"
    return f"{' '.join(names[len(names) - len(bias):])}, i k, k j -> i j | whole k"


def _baddbmm(call: Call) -> str:
    outs, bias = call.outs[0], call.ins[0]
    names = ["b", "i", "j"][3 - len(bias) :]
    sizes = outs[3 - len(bias) :]
    dims = [n if s == o else "1" for n, s, o in zip(names, bias, sizes, strict=True)]
    return f"{' '.join(dims)}, b i k, b k j -> b i j | whole k"


register_rule(aten.addmm.default, text=_addmm)
register_rule(aten.baddbmm.default, text=_baddbmm)


# -- groups of rows, with a matrix for each -------------------------------------------------------


def _emit_groups(call: Call, local: Local) -> Any:
    x, other, *places, groups = local.args
    rows = len(call.ins[0]) - 2
    in_blocks = len(call.ins[2]) > rows + 1
    if not in_blocks and len(own := local.operand_range(0, rows)) < call.ins[0][rows]:
        places = [_within(local, at, own) for at in places]
    return local.call(call.target, x, other, *places, groups)


def _within(local: Local, at: Any, rows: range) -> Any:
    """Positions among all rows, counted from a rank's first and at most its number of rows."""
    return local.call(
        aten.clamp.default, local.call(aten.sub.Tensor, at, rows.start), 0, len(rows)
    )


def _groups(x: str, other: str, out: str) -> Callable[[Call], str]:
    """The rule of a product, with rows in blocks where the places of groups are; a block is not split.

    Groups that have owners have a leading dim of owners.
    """

    def text(call: Call) -> str:
        owner = "o " * (len(call.ins[0]) - 2)
        in_blocks = len(call.ins[2]) > len(call.ins[0]) - 1
        rows, places, how = ("(r s)", "r e", "whole s | run e") if in_blocks else ("s", "e", "run s e")
        dims = [owner + dims.replace("s", rows) for dims in (x, other)] + [owner + places] * 2
        return f"{', '.join(dims)} -> {owner}{out.replace('s', rows)} | {how} | linear 0 | linear 1"

    return text


register_rule(GROUPED_MM, text=_groups("s k", "e k n", "s n"), emit=_emit_groups)
register_rule(GROUPED_OUTER, text=_groups("s k", "s n", "e k n"), emit=_emit_groups)
