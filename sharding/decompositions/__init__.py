"""Decompositions of operations into operations that can be split, used if they make the plan cheaper.

Operations that read neighbours along a split dim (a slice that is not aligned with the shards, a roll, a
cumulative sum, a convolution of a split image) are decomposed with three operations of our own
(`sharding/rules/blocks.py`). A dim of n over R ranks is R **blocks** of ceil(n/R), so the dim of blocks
is split evenly and a block is not split: ``blocks`` and ``unblocks`` are local, and their rules have
``tie n r``: both dims are split, or neither. A **window** is, for each block, a list of runs of the
global dim; only ``windows`` communicates, as its rule's ``halo`` states. The operation itself then runs
on the windows, with blocks as an additional batch dim, so a max pool needs no code for borders. These are
global operations: a program with them is still one graph over global shapes.

Experts are rewritten as a whole, not operation by operation (`row_by_row.py` says which operations
compute each row by itself). Tokens that are sorted by expert are sorted in blocks, if no result depends
on their order (`sorted_rows.py`). If experts are split, products and what is between them get a dim of
owners (`group_owners.py`), who must all have the rows (`shared_values.py`).
"""
