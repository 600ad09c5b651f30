"""From a planned program to what each rank runs.

`runtime.py` has two runtimes: ``Simulated`` lowers every coordinate of a virtual mesh into one
graph, ``Distributed`` lowers this rank's own, with functional collectives issued early and waited
for at the first use of the result. A value is computed once per *distinct* coordinate, so what is
replicated costs once. A rank whose shard is empty runs no kernel, has the identity of the
reduction, and takes part in every collective. gloo's maximum drops NaN, so maxima and minima of
floats travel as order-preserving integers; dtypes that transports lack travel as those they have
(`carriers.py`).

Before the first call of a plan, ranks compare a digest of it, and checksums of plain inputs,
closures and constants, through the process group's store with a timeout (`plan_consistency.py`).
Collectives match by their order alone, so before each call of a plan that sends anything the ranks
of each of its groups compare which plan it is, from which thread, and how many calls have failed
(`call_order.py`): half a kilobyte in log2(n) rounds, about what the smallest all_reduce costs. One
thread of a process runs plans at a time. Groups of a mesh wait no longer than the default group.

A line of generated code is one operation, so the line of a traceback tells which one raised, and
its tags what to say: a note, or, for a call in which other processes take part, a
``CollectiveError``.
"""
