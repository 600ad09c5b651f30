"""Operations in pieces that can be split, taken on demand where the plan gets cheaper.

What reads its neighbours along a split dim (a cut off the shards' edges, a roll, a running sum, a
convolution of a split image) is written with three operations of our own
(`sharding/rules/blocks.py`). A dim of n over R ranks is R **blocks** of ceil(n/R), so the dim of
blocks is split evenly and a block is whole: ``blocks`` and ``unblocks`` are local, and their rules
say ``tie n r``, split together or not at all. A **window** is, for each block, a list of runs of
the whole dim; only ``windows`` crosses the network, by what its rule's ``halo`` says. The operation
itself then runs on windows, blocks being one more batch dim: a max pool knows nothing of borders.
These are global operations: a program with them is still one graph over global shapes.
"""
