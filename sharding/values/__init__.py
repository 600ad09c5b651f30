"""Meshes, specs, and the values that are placed by them.

A P may have names of dims: ``rules=`` replaces them by axes (`axis_rules.py`) before any other code
reads the spec. `constrain` runs without a mesh, so its names are kept in the graph, and the enclosing
`shard` replaces them.

An operation on a placed value outside any trace is a sharded program of that one operation
(`eager.py`), so the only rules are the planner's. `operators.py` has the operators and methods of
placed values.
"""
