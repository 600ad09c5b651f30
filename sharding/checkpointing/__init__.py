"""Saving and loading placed values by torch.distributed.checkpoint.

In DCP a tensor is a set of boxes with offsets, whichever rank wrote them. So a shard is stored as the
boxes that it covers: one box, or, if a dim is split inside (heads of a fused projection), a product of
runs. Resharding on load needs nothing else: a reader copies the overlaps of its shards with the boxes
(`dcp_chunks.py`).

DCP's own ``save`` gathers plans by collectives of the default group, and waits for a lost rank until that
group times out. Here nothing needs to be gathered: the tree, which all ranks have, determines which rank
writes which shard. Ranks confirm to each other through the store, with a timeout, that the trees are
equal, that their files are written, and that the index is written. Each save writes its files to its own
directory next to the path (`unfinished.py`); the first rank writes the index and renames the directory,
so a path is a complete checkpoint of one save or does not exist.

DCP's reader executes whatever its pickled index names, loads damaged bytes, and leaves elements unchanged
if no box has them (tests/sharding/checkpointing/test_storage_damage.py, `-k plain`). So `index.py`
unpickles only plain values and refuses files outside the directory, and `items.py` reads items and
verifies their checksums. DCP's own writer writes them, by a planner of its interface.
"""
