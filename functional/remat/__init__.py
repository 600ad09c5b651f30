"""Which values of its forward a backward saves, recomputes or offloads.

Checkpointing marks nodes first and recomputes last. `checkpoint` only marks nodes, those of the backward
included, with the **segments** they are in: a call of the function, an entry of a scope, or the whole
function. Marks survive replay, sharding and decomposition. When every other rewrite has run, a backward
node that reads a value of the forward is given the **version** that the policy asks for: the value
itself, a recomputation (the same operation on versions of its operands, right before the first use), or a
copy from host memory (`recompute.py`, `rematerialise.py`). So policies see collectives and fused kernels,
every order of transforms gives the same program, and a program whose gradients are taken inside needs no
mechanism of its own.

A use reads the recomputed value only inside segments that enclose both the use and the definition.
Nesting follows from this rule, and so do the outputs of a segment: a use outside shares no segment
with the definition and reads the value itself.

A *pass* tells forward from backward: 0 for the forward, 1 for gradients taken inside, 2 for the
operations that depend on the cotangents of a joint program, and those that only they need. An edge
to a later pass is a residual.

`liveness.py` says which storages are alive at each operation, to the byte: it runs the list of what runs
with storages in the place of tensors (execution/storages.py). A budget (`budget.py`, `remat_ilp.py`) is
an integer program over coarse time steps, since each value is recomputed at most once; its solutions
under falling bounds are applied, their peaks are read, and those that are best in peak and FLOPs are the
envelope. A loop is planned by one iteration (`budget_problem.py`);
of its layers, the first ones keep what one solution does, and the others, which the backward needs
first, what another one does. Compilers would merge a recomputation with the original value, or
recompute everything at the start of the backward: a barrier (`barrier.py`), an opaque copy of the
smallest operand, prevents that in compiled graphs.
"""
