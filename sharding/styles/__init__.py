"""Plans for whole models.

Styles write specs and named constraints; propagation does the rest. Layouts default to "left to
propagation": the weights already imply Megatron's collectives, and a pin is total, so it would
gather the batch over other axes (hence ``batch=``). Heads must stay whole, and no shape says where
they are: `heads.py` follows each dim of each weight by the factor rules, which know what every
view, cut and contraction does to a dim. Fused projections are found as parts, groups of keys and
values as what the queries are split by.
"""
