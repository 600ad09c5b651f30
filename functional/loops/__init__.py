"""Loops and conditionals: bodies and branches, represented once from the trace to the code that runs.

A loop has two forms. In a traced program it is one node whose target is a `LoopCall` (call.py): a body
program, and the role of each of its inputs and outputs in the loop. Its derivatives are loops of derived
bodies (derived.py, differentiated.py), so they can be taken in any order. To be lowered, a program is
*rolled* (rolled.py): the nodes of the body are in the graph of the program, tagged with their loop, and
markers (programs/markers.py) mark the values that enter and leave an iteration. A rolled program is a
program for one iteration of each loop; passes read it like any other, and count operations in a loop n
times. For passes that cannot do this, it is unrolled (programs/unrolled.py).

``repeat(lambda w, x: torch.tanh(x @ w), w, x)`` over 4 layers, and its gradient, rolled (operations that
run 4 times are indented)::

        row   = row(w)                      the weights [3, 3] of this iteration, of w [4, 3, 3]
        enter = enter(x)                    the carry as this iteration receives it, first x
        mm    = mm(enter, row)
        tanh  = tanh(mm)
        again = again(tanh, enter)          the next iteration receives tanh
    leave = leave(again)                    the carry of the last iteration
    ...
        enter_1 = enter(cotangent)          a second loop, in reverse order
        back    = tanh_backward(enter_1, tanh)      tanh of the same row, which is saved
        mm_1    = mm(t(enter), back)
        again_1 = again(mm(back, t(row)), enter_1)
    rows  = rows(mm_1, 4)                   the gradient of w: mm_1 of all iterations, stacked

A Python loop over equal layers is found when a program is lowered: periods in the sequence of its
operations (periods.py), layers whose operands come from the same places (equal_layers.py, layers.py), the
same layers in a forward and its backward (alignment.py). recognised.py builds the rolled program. Tables
of which each iteration of `repeat` looks up its row are operands of rows (looked_up.py).

A loop that runs as long as a value is true carries that value first, and nothing of its iterations is
kept (open_loops.py). A conditional is a node, too, whose target is a `BranchCall` (branch_call.py); its
derivatives are conditionals of the branches' derivatives (branches.py), so what is not taken has no part
in them. Rolled, all branches are in the graph, and `chosen` selects among their results; what runs
computes only what is chosen (execution/choices.py).
"""
