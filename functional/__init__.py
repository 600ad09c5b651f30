"""What a pure function is, and what can be done to any of them.

Imports neither `torchard.sharding` nor `torchard.kernels`.
"""
