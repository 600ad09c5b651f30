"""Lowering: from a planned program to the graph that each rank runs.

`runtime.py` has two runtimes: ``Simulated`` lowers every coordinate of a virtual mesh into one graph;
``Distributed`` lowers this rank's own, with functional collectives issued early and waited for at the
first use of the result. A value is computed once per *distinct* coordinate, so replicated values are
computed once. A rank whose shard is empty runs no kernel: its result is the identity of the reduction,
and it takes part in every collective. gloo's maximum drops NaN, so maxima and minima of floats are sent
as order-preserving integers; values whose dtype a backend does not support are converted to a supported
dtype (`carriers.py`). Sends from one rank to another are direct if a rank's graph runs as Python
(`direct_sends.py`).

Before the first call of a plan, ranks compare a digest of it, and checksums of plain inputs, closures and
constants, through the process group's store with a timeout (`plan_consistency.py`). Collectives are
matched only by order. So before each call of a plan that communicates, the ranks of each of its groups
compare the plan, the calling thread and the number of failed calls (`call_order.py`): half a kilobyte in
log2(n) rounds, over sockets within a host and over gloo between hosts. One thread of a process runs
plans at a time. Groups of a mesh time out no later than the default group.

Each line of generated code is one operation, so the line of a traceback identifies the operation
that raised. Its tags supply the message: a note, or, for a call in which other processes take part,
a ``CollectiveError``.
"""
