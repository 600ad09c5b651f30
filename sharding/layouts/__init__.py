"""Arithmetic of layouts: dims split over mesh axes, and what a reshard costs.

A dim is a product of **sub-dims**, each split over an ordered tuple of mesh axes (`layout.py`).
Flattening concatenates sub-dims and un-flattening takes them apart, so ``[b, s, d] -> [b·s, d]``
with s split is no reshard, and neither is its gradient. Layouts have a normal form in which equal
ownership compares equal. An axis may also be *pending*: each coordinate holds a contribution that a
reduction completes.

A factor rule says in one line how an operation can be split (`factors.py`):

    aten.mm         i k, k j -> i j | linear 0 | linear 1
    aten.embedding  v d, ... -> ... d | reduce v sum | linear 0

Factors on no result are reduced; ``whole`` ones may not be split; ``index`` and ``free`` ones are
made in place; ``linear`` says through which operands pending sums may pass. `options.py` turns a
rule and a mesh into every way one operation can run; `reshard.py` finds the cheapest collectives
between two layouts, by shortest path; `collective_ops.py` is the alphabet of collectives.
"""
