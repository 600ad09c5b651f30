"""Microbatches: the slices of a batch, computed one after another.

A microbatch is a coordinate of a mesh axis in time. The factor rules determine which values differ
between microbatches (``spread.py``), as they determine a plan for an axis in space, with one difference:
there are no choices. Values that depend on the batch are split or pending sums, and all other values are
unsplit. If the rules permit only a gather, the function cannot be decomposed. Sums become running sums,
and the microbatches' operations are put one after another in one program (``turns.py``).
"""
