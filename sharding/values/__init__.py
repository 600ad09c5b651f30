"""Meshes, specs, and the values that are placed by them.

A P of names is a P: ``rules=`` swaps its entries for axes (`axis_rules.py`) before anything else
looks at it. `constrain` runs without a mesh, so its names travel in the graph, and the shard whose
program it is swaps them.

An operation on a placed value outside any trace is a transform of that one operation (`eager.py`),
which the placement of its operands makes a sharded one: there are no rules but the planner's.
`operators.py` is what a value looks like from outside.
"""
