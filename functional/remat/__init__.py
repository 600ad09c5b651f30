"""What a backward keeps of its forward, recomputes or offloads.

Checkpointing is *marks first, versions last*. `checkpoint` only marks nodes with the **segments**
they are in (a call of the function, an entry of a scope, or all of it), those of the backward too.
Marks survive replay, sharding and decomposition. When every other rewrite has run, a backward node
that reads a value of the forward is given the **version** its policy means: the value itself, the
same operation once more on versions of its operands right before the first use, or a copy that
waited on the host (`recompute.py`, `rematerialise.py`). So policies see collectives and fused
kernels, every order of transforms is the same program, and a program with its gradients inside
needs no mechanism of its own.

A use reads the recomputed value only inside segments that enclose both the use and the definition.
That is all there is to nesting, and to what a segment hands on: a use from outside shares no
segment and reads the value itself.

A *pass* tells forward from backward: 0 for the forward, 1 for gradients taken inside, 2 for what
the cotangents of a joint program lead to, and whatever only that needs. An edge to a later pass is
a residual.

`liveness.py` knows what is alive when, to the byte: the generated code frees after the last use. A
budget (`budget.py`, `remat_ilp.py`) is an integer program with coarse time, since each value is
recomputed at most once; choices under falling bounds are carried out and simulated, and the best in
peak and FLOPs are the envelope. Compilers would merge a version with the value it is a version of,
or make all versions at once: a barrier (`barrier.py`), an opaque copy of the smallest operand,
keeps them apart in compiled graphs.
"""
