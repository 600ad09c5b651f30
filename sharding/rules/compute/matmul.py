"""Contractions: products of matrices and vectors, which sum over one factor."""

from __future__ import annotations

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.registry import Call, register_rule

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
