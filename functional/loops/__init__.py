"""Loops: one body that runs n times, kept as one from the trace to the code that runs.

A loop has two forms. In a traced program it is one node whose target is a `LoopCall` (call.py): a body
program and what each of its inputs and outputs is to the loop. Its derivatives are loops of derived bodies
(differentiated.py), so they can be taken in any order. To be lowered, a program is *rolled* (rolled.py):
the body's nodes stand in the program's own graph, tagged with their loop, and a few marker operations
(markers.py) say what enters an iteration and leaves it. A rolled program is a program for one iteration of
each loop; passes read it as any other, and count what is in a loop n times. For passes that cannot, it is
unrolled (unrolled.py).
"""
