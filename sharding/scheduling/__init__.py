"""Which collectives a plan needs, when each is issued, and which are merged.

`partition.py` writes a plan down: layouts on nodes, reshard steps between them. An SPMD program is
global-shaped: a step is the identity on global values. Dropping the steps gives the global program
back (``unpartition``), which is how a shard of a shard becomes one partition with the constraints
of both, and why planning costs the same for 4 ranks and 4,096.

Members of a bucket (`bucket.py`) stay steps of their own and stand side by side, so that everything
that reads an SPMD program still can. An all_reduce joins the open bucket of its kind if its operand
is ready before the first result of the bucket is used; one that is used before the next could join
goes alone, so an activation never waits.

A fully sharded step holds its own part of weights, gradients and moments, the activations, and at
most two layers whole (`gathers.py`, `schedule.py`): a gathered layer is unpacked before the next
one is asked for; gradients scattered two layers ago are waited for; each update is whole before the
next begins; donated inputs are released. Gathers along axes that split the batch are repeated in
the backward; others are kept.
"""
