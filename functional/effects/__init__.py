"""Writes in place become values; buffers of modules become results.

Memory that is written to has one value at a time, that of its *root*, the operation that made it; a
view is a *step* from another view. `writes.py` walks the recorded graph once. A write computes the
operation's functional twin, found by its schema (`mutation.py`), and replaces the root's value by
what the inverses of the steps make of it (`scatters.py`); a view is taken again where it is read
after a write. ``as_strided`` is turned into the slices, diagonals and permutations it stands for,
or into an index. Nothing is traced again, so nodes keep their tags, and a ``detach`` (tagged
``cut``) remains one. Whatever still writes after that is refused by its line.

A graph does not show all that autograd would do. Where it does not (gradients switched off,
autograd.Functions, ``detach_``, a write through a detached alias, a write that autograd refuses),
derivatives run the function itself again (``Program.retrace``; `grad_dependent_ops.py`).

torch's batch norms write to their arguments, mostly without a word of it in their schemas.
`batch_norm.py` makes one pure operation of each, and lerps of the running statistics. It also
computes batch norm in the open where a derivative needs the statistics as functions of the input:
torch's own formulas take them for constants, and are wrong from the second derivative on in forward
mode, and from the third in reverse mode.
"""
