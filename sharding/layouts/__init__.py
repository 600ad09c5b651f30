"""The arithmetic of layouts: how dims are split over mesh axes, and the cost of a reshard.

A dim is a product of **sub-dims**, each split over an ordered tuple of mesh axes (`layout.py`).
Flattening concatenates sub-dims and unflattening separates them, so ``[b, s, d] -> [b·s, d]`` with s
split needs no reshard, and neither does its gradient. Layouts have a normal form: those that give every
coordinate the same elements compare equal. A value may also be *pending* over an axis: each coordinate
then holds a partial result, which a reduction over the axis completes.

A factor rule states in one line how an operation can be split (`factors.py`):

    aten.mm         i k, k j -> i j | linear 0 | linear 1
    aten.embedding  v d, ... -> ... d | reduce v sum | linear 0

Factors that are in no result are reduced. ``whole`` factors may not be split. ``index`` and ``free``
factors are in no operand, and each rank computes its shard of them. ``linear`` names the operands through
which pending sums may pass. `options.py` enumerates, from a rule and a mesh, the ways in which an
operation can run; `reshard.py` finds the cheapest collectives between two layouts, by shortest path;
`collective_ops.py` defines the collectives. Equal layouts, rules and options are one object
(`interned.py`).
"""
