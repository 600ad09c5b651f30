"""An `nn.Module` in a call.

`copying.py` makes the copy that runs, without weights, and `rebinding.py` lets functions that it holds
refer to it. A call puts its values in every place of the copy's own tensors (`places.py`); a mode sees
to those of the original (`registered.py`). `state.py` finds and undoes what a call changes, by what
`containers.py` reads and writes; `checks.py` refuses what cannot be undone. `scopes.py` names what
parts compute, and `rows.py` are rows of stacked layers, as they are read.
"""
