"""Loops: one body that runs n times, kept as one from the trace to the code that runs.

A loop has two forms. In a traced program it is one node whose target is a `LoopCall` (call.py): a body
program, and what each of its inputs and outputs is to the loop. Its derivatives are loops of derived
bodies (derived.py, differentiated.py), so they can be taken in any order. To be lowered, a program is
*rolled* (rolled.py): the nodes of the body stand in the graph of the program, tagged with their loop, and
markers (programs/markers.py) say what enters an iteration and leaves it. A rolled program is a program
for one iteration of each loop; passes read it as any other, and count what is in a loop n times. For
passes that cannot, it is unrolled (programs/unrolled.py).

A Python loop over equal layers is found when a program is lowered: periods in the sequence of its
operations (periods.py), layers whose operands come from the same places (equal_layers.py, layers.py), the
same layers in a forward and its backward (alignment.py). recognised.py makes the rolled program of them.
"""
