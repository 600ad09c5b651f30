"""Proofs of plans: a sharded program computes the same as its global program, for all values.

The idea: a plan is one graph over global arrays. Each node has a layout, which states which indices of
the value each rank holds, or that the ranks' values are still to be reduced; each reshard step is the
identity on global arrays. So equality is local: if the operands of a node are sharded as their layouts
state, its results are too. For an operation, its factor rule guarantees this; for a step, it follows from
how its collective moves data between ranks. By induction along the graph the results are correct.

The files:

- `holdings`: which indices each rank holds, from a layout, rank by rank, in plain arithmetic of ranges;
- `steps`: how a collective changes these ranges, and which collectives may be sent as one call;
- `operations`: when layouts of operands and results are an instance of a factor rule;
- `certificates`: that a factor rule is true of its operator, tested once for each claim that a plan uses;
- `proof`: the walk over the graph, inputs and outputs, and the report.

What is proved. Let G be the plan's graph without the steps. If every rank receives its shard of each
input, as the input's placement states, then the results of the ranks are the shards, as the placements of
the results state, of G's results for the global inputs. This holds in exact arithmetic, on every mesh of
these sizes.

What is taken for granted:

- A factor rule that is certified on small shapes is true at all shapes: a certificate is a test of the
  operator itself, not of the local code that ranks run for it, on random values and with random sizes of
  the factors.
- G is the function that was traced. `equal` and `localize` test that.
- What lowering adds: local code that differs from the operator (masks, offsets, local sizes), the
  exchange of windows between neighbours (``torchard::windows``), and the collectives that a user wrote
  in a `shard_map`. Nodes of the last two kinds are listed as assumed.
- Rounding: a sum over ranks is rounded in another order.

Nothing here is shared with propagation, planning, partition or lowering; layouts, tags and the registry
of rules are read as data.

Sources: Scalify, arXiv:2509.10694; TrainVerify, SOSP 2025; GSPMD, arXiv:2105.04663.
"""

from torchard.testing.prove.proof import Gap, Proof, Unproved, prove

__all__ = ["Gap", "Proof", "Unproved", "prove"]
