"""What a function reads without being given it, and whether that has changed since it was traced.

A trace holds for one state of everything the function reads. `closures.py` finds the tensors it
closes over: each call reads them afresh, and a trace with a tensor that cannot be found again is
not cached. `environment.py` guards the rest (settings, structure, functions; `reachable.py` walks
them, `referenced_names.py` reads code objects): a cached trace is used while every slot holds the
very object it did, one pass in C over cells, entries and attributes, or, failing that, while what
is reached compares equal.
"""
