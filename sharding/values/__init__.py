"""Meshes, specs, and placed values.

A P may name dims instead of axes: ``rules=`` maps the names to axes (`axis_rules.py`) before any other
code reads the spec. `constrain` runs without a mesh, so its names stay in the graph until the enclosing
`shard` replaces them.

An operation on a placed value outside any trace runs as a sharded program of that one operation
(`eager.py`), so there are no sharding rules besides the planner's. `operators.py` defines the operators
and methods of placed values.
"""
