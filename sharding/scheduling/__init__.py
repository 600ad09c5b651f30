"""Scheduling: the collectives of a plan, when each is issued, and which are merged.

`partition.py` writes a plan into the graph: layouts on nodes, reshard steps between them. An SPMD program
has global shapes, and a step is the identity on global values, so planning costs the same for 4 ranks and
4,096. Dropping the steps recovers the global program (``unpartition``).

Members of a bucket (`bucket.py`) remain separate, adjacent steps, so that everything that reads SPMD
programs still works. An all_reduce joins the open bucket of its kind if its operand is ready before the
first result of the bucket is used. If its result is used before the next all_reduce could join, it is
sent by itself, so an activation never waits.

A fully sharded training step prefetches parameters: each layer is gathered one layer ahead of its use
(``Schedule(prefetch=...)``, `gathers.py`, `schedule.py`), and its gradients are scattered by one call
when the last of them is computed and the scatter before has arrived (`scatters.py`). It holds its shards
of weights, gradients and moments, the activations, and at most two gathered layers: a gathered layer is
unpacked before the next gather is issued; gradients scattered two layers ago are awaited; each update is
complete before the next begins; donated inputs are released. Gathers along axes that split the batch are
repeated in the backward; the results of other gathers are saved. A parameter that is cast where it is
used is gathered in the narrower dtype, and its cast counts as a view (`casts.py`).

Sums over ranks that are added are added before they are reduced (`added_sums.py`), and gathers of
activations that are used at one place are sent by one call (`near_gathers.py`).
"""
