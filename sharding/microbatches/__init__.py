"""Microbatches: the slices of a batch, computed one after another.

A microbatch is a coordinate of a mesh axis that lies in time. Which values differ between microbatches
follows from the factor rules (``spread.py``), as a plan for an axis in space does, with one difference:
nothing is chosen. What depends on the batch is split or a pending sum, everything else is whole, and
where the rules leave only a gather the function does not decompose. Sums become running sums, and the
microbatches' operations are put one after another in one program (``turns.py``).
"""
