"""Guards: the environment that a function reads, and whether it has changed since the trace.

A trace is valid for one state of all that the function reads. `closures.py` finds the tensors that the
function closes over: each call reads them again, and a trace with a tensor whose path is unknown is not
cached. `environment.py` guards everything else: settings, structure and functions, which `reachable.py`
walks. It follows the names in code objects (`referenced_names.py`), except names that are only written
(`written_names.py`); `indirect.py` follows reads through the library's functions and objects. A cached
trace is used if every slot (`slots.py`: a cell, entry or attribute) holds the same object, which is
checked in one pass in C, or otherwise if everything reachable compares equal. `changes.py` names the
objects that differ. `references.py` finds tensors in objects of any kind, for results that are not pytree
nodes. `present_cells.py` copies functions with what they close over now.
"""
