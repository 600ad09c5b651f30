"""Planned memory: every value of a program has its place before the program runs.

A program's calls are recorded once on fake tensors, with its loops unrolled, as a *tape* (tape.py).
Operations that can write to given memory do (destinations.py): then allocations are steps of the tape,
whose buffers have sizes and lifetimes (lifetimes.py), and some take the memory of others (reuse.py).
They are packed into one block (packing.py), and the tape becomes straight-line code whose operands are
tensors in that block, views included (planned_code.py).
Blocks belong to the arena of the process, which lends them to one call at a time (arena.py).

Tensors that a caller can hold are never in a block: results, tensors that they alias, and inputs.
"""
