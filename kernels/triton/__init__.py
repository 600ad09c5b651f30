"""The library's memory-bound kernels in Triton, one file per family.

They are imported when the first of them runs, since Triton is optional. Each reads every operand once and
writes every result once, computes in float32 (in float64 for float64), and rounds once. Sums over rows
are accumulated per program, each of which loops over many rows, and are added up in a second, small step,
without atomics, so that results are deterministic.

Source: Tillet et al. 2019 (doi:10.1145/3315508.3329973) for the language.
"""
