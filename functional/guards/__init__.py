"""Guards: the environment that a function reads, and whether it has changed since the trace.

A trace is valid for one state of all that the function reads. `closures.py` finds the tensors that the
function closes over: each call reads them again, and a trace with a tensor whose path is unknown is not
cached. `environment.py` guards the rest: settings, structure and functions, which `reachable.py` walks.
It goes by the names in code objects (`referenced_names.py`), without those that are only written
(`written_names.py`); what is read through the library's functions and objects is in `indirect.py`. A
cached trace is used while every slot (`slots.py`: a cell, entry or attribute) holds the same object,
which is one pass in C, or else while everything reachable compares equal. `changes.py` names what
does not. `references.py` finds tensors in objects of any kind, for results that are no pytree nodes.
"""
