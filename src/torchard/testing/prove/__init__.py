"""Proofs of plans: the ranks of a sharded program compute what it says over whole arrays, for all values.

The one idea: a plan is one graph over whole arrays. Each node has a layout, which says of every rank
which indices of the value it holds, or that the ranks' values are still to be reduced; each reshard step
is the identity on whole arrays. So equality is local. If the operands of a node are held as their layouts
say, its results are held as theirs say: for every operation by its factor rule, for every step by what
its collective does to who holds what. By induction along the graph the results are right.

The data of the argument:

- `holdings`: which indices each rank holds, from a layout, rank by rank, in plain arithmetic of ranges;
- `steps`: what a collective does to those ranges, and which collectives may be sent as one call;
- `operations`: when layouts of operands and results are an instance of a factor rule;
- `certificates`: that a factor rule is true of its operator, tested once for each claim that a plan uses;
- `proof`: the walk over the graph, inputs and outputs, and the report.

What is proved. Let G be the plan's graph with the steps left out. If every rank is given its part of
each input, as the input's placement says, then the parts of each result, as its placement says, are those
of what G gives for the whole inputs; this in exact arithmetic, on every mesh of these sizes.

What is taken for granted:

- A factor rule that is certified on small shapes is true at all shapes: a certificate is a test, on
  random values and with random sizes of the factors, of the operator itself and not of what ranks run
  for it.
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
