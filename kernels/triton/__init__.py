"""The library's kernels that move memory, in Triton: one file per family.

Nothing of torchard imports them before one is to run: Triton is optional. All read each operand once
and write each result once, compute in float32 (float64 in float64), and round once. Sums over rows are
made per program, each of which goes on over many rows, and added up in a second, small step: no atomics,
so that results are the same each time.

Source: Tillet et al. 2019 (doi:10.1145/3315508.3329973) for the language.
"""
