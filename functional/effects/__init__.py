"""In-place writes become values; buffers of modules become results.

Memory that is written to has one current value, that of its *root*, the operation that allocated it; a
view is a *step* from another view (`aliases.py`). `writes.py` walks the recorded graph once. For a write
it calls the operation's functional twin, found by its schema (`mutation.py`), and computes the root's new
value by the inverses of the steps (`scatters.py`); a view that is read after a write is recomputed.
``as_strided`` becomes the slices, diagonals and permutations it stands for, or an index. Nothing is
retraced, so nodes keep their tags, and a ``detach`` (tagged ``cut``) remains one. An operation that
still writes after that is refused, with its source line.

A graph does not determine everything that autograd would do. Where it does not (gradients switched
off, autograd.Functions, ``detach_``, a write through a detached alias, a write that autograd
refuses), derivatives run the function itself again (``Program.retrace``; `grad_dependent_ops.py`).

``x[i]`` with a tensor for i would be a view, of which a trace does not know the place: it is a lookup,
and what would tell it from a view is refused (`picked.py`).

torch's batch norms write to their arguments, and most of their schemas do not say so. `batch_norm.py`
replaces each by one pure operation, and lerps of the running statistics. It also decomposes batch
norm where a derivative needs the statistics as functions of the input: torch's own formulas treat
them as constants, and are wrong from the second derivative on in forward mode, and from the third in
reverse mode.
"""
