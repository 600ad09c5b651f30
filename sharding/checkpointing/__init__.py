"""Saving and loading placed values by torch.distributed.checkpoint.

In DCP a tensor is a set of boxes with offsets, whichever rank wrote them. So a shard is stored as the
boxes that it covers: one, or, where a dim is split inside (heads of a fused projection), a product of
runs. Resharding on load needs nothing else: a reader copies the overlaps of its shards with the boxes.

DCP's own ``save`` gathers plans by collectives of the default group, and waits for a lost rank as
long as that group does. Here nothing needs to be gathered: the tree, which all ranks have, determines
which rank writes which shard. Ranks confirm to each other through the store, with a timeout, that the
trees are equal, that their files are written, and that the index is. Files are written to a directory
beside the path, which each save has for itself (`unfinished.py`); the first rank writes the index and
renames the directory, so a path is a complete checkpoint of one save or does not exist.

DCP's reader runs whatever its pickled index names, loads damaged bytes, and leaves elements as they were
if no box has them (tests/sharding/checkpointing/test_storage_damage.py, `-k plain`).
So `index.py` unpickles plain values only, and refuses files outside the directory, and `items.py` reads
items and verifies their checksums; DCP's own writer writes them, by a planner of its interface.
"""
