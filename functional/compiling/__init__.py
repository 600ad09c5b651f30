"""What `jit` gives to a compiler: regions of a program, and repairs of Inductor's faults.

A task of a pipeline's schedule, or a body of a loop, is a region (regions.py). Equal regions share one
compiled function, and what a region is the last to read it may write over (region_donation.py). Before
Inductor lowers a graph, passes work around its faults (compiler_repairs.py and what that names).
"""
