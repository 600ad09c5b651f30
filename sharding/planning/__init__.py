"""Planning: the choice of a layout for each value of a program.

`canonicalize.py` drops operands that are read only for their dtype and shares equal views. `propagate.py`
and `sweep.py` choose an option for each operation, the best one by `best.py`; nothing else depends on how
they choose. `minimum/` improves what they have chosen.

Options are compared in this order: parallelism lost; a constraint downstream missed; shards moved, by the
rank of their origin (batch input, parameter, constraint, derived); bytes sent, including those from the
result to the layouts that consumers prefer; size of the result. Minimising only bytes degenerates: it
gathers token ids and small weights and replicates all computation.

- A shard is not moved if the required version is available already, so the backward of a linear reuses
  the gathered input.
- A constraint is carried back through pointwise operations to the contraction that computes the value.
- A pending sum flows along single-use edges and is resolved at a fork, once, into the layout that
  suits its consumers (by an all_reduce or a psum_scatter).
- A reshard of a view is applied to its base, so that all aliases share it (`aliases.py`).
- Sweeps are repeated with the layouts that consumers preferred as additional options; the cheapest
  sweep is chosen.
- A cotangent takes the layout of its output. The forward, which comes first in the joint program, has
  chosen this layout already.
- An output that is computed elementwise from an input of its shape, such as a new parameter or Adam's
  moments, takes the layout of that input (`updates.py`).


These comparisons are local: gathering the input of one norm looks cheap, but every rank then computes
everything that follows. So complete plans are compared too, by bytes sent plus the busiest rank's work
(`decision.py`). Operations are decomposed *within* a sweep, each as soon as it would lose an axis, so a
network of any depth takes one sweep. If an axis over which the user split a value splits no products, the
axis is restored on unsplit values (`stakes.py`): on the dim along which the neighbouring activations are
split, or the dim with the most work depending on it.
"""
