"""Control flow as operations of a program: loops whose bodies are programs.

iteration.py runs a step n times, as a Python loop or as one operation (loops/call.py); `scan`, and
`repeat` in the folder above, are ways to write the step. A conditional (cond.py) is one operation, too
(loops/branch_call.py). associative_scan.py is no loop: it is written as a tree of plain operations, in
blocks that the ranks of a mesh hold.
"""
