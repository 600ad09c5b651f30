"""Saving and loading placed values by torch.distributed.checkpoint.

To DCP a tensor is a set of boxes with offsets, whoever wrote them, so a shard is stored as the
boxes it is of the whole: one, or, where a dim is split inside (heads of a fused projection), a
product of runs. Resharding is nothing else: a reader asks which boxes its own shards overlap, and
copies those parts.

DCP's own ``save`` gathers plans by collectives of the default group, and waits for a lost rank as
long as that group does. Here nothing needs gathering: who writes which shard follows from the tree,
which all ranks have. Ranks tell each other through the store, with a timeout, that the trees are
equal, that their files are written, and that the index is. Files are written to
``PATH.unfinished``; the first rank writes the index and renames the directory, so a path is a whole
checkpoint or does not exist. `index.py` unpickles DCP's plain values only, and refuses files
outside the directory; `items.py` verifies checksums.
"""
