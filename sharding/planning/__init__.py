"""Which layout each value of a program gets.

`canonicalize.py` drops operands that only lend a dtype and shares equal views; `propagate.py` and
`sweep.py` choose an option for each operation, and nothing outside knows how, so that a solver
could take their place.

Options are compared in this order: parallelism lost; a constraint downstream missed; shards moved,
by the rank of what they stem from (batch input, parameter, constraint, derived); bytes on the wire,
onward to what consumers asked for; size of the result. Bytes alone are degenerate: they gather
token ids and small weights and replicate all compute.

- A shard is not moved if the wanted version is available already, so the backward of a linear
  reuses the gathered input.
- A constraint is carried back through pointwise operations to the contraction that makes the value.
- A pending sum flows along single-use edges and is resolved at a fork, once, into the layout that
  suits its consumers (all_reduce or psum_scatter).
- A reshard of a view is made on its base, where every alias shares it (`aliases.py`).
- Sweeps repeat with the layouts that consumers asked for as further options; the cheapest sweep is
  kept.
- A cotangent takes the layout of its output, which the forward part of the same joint program has
  settled by then.

An operation sees only its own loss: gathering the input of one norm looks cheap, and every rank
then computes all that follows. So plans are compared as wholes, by bytes on the wire plus the
busiest rank's work (`decision.py`). Operations come apart *within* a sweep, each as soon as it
would lose an axis, so a network of any depth takes one sweep. If an axis that was asked for does
not split the products, it is brought back wherever values are whole (`stakes.py`): to where the
activations beside are split, or to the dim with most work behind it.
"""
