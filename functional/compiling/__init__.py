"""Regions of a program, which `jit` gives to a compiler, and workarounds for Inductor's faults.

A task of a pipeline's schedule, or a body of a loop, is a region (regions.py). Equal regions share one
compiled function. A region may write over values that it is the last to read (region_donation.py). Before
Inductor lowers a graph, passes work around its faults (compiler_repairs.py and the files it names), and
have writes done in place (writes_in_place.py) where nothing reads what they write over (write_chains.py).
"""
