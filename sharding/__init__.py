"""Where data lives, and what crosses the network.

Imports `torchard.functional`, never `torchard.kernels`.
"""
