"""An `nn.Module` in a call.

`copying.py` makes the copy that runs, without weights, and `rebinding.py` makes the functions that the
copy holds refer to the copy. A call puts its values wherever the copy holds its own tensors
(`places.py`); a mode redirects operations on the original's tensors (`registered.py`). `state.py` finds
and undoes the changes of a call, using the reads and writes of `containers.py`; `checks.py` refuses
changes that cannot be undone. `scopes.py` names the values that submodules compute, and `rows.py` has the
rows of stacked layers as a forward reads them.
"""
