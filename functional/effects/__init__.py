"""In-place writes become values; buffers of modules become results.

Memory that is written to has one current value: the value of its *root*, the operation that allocated it.
A view is a *step* from its base (`aliases.py`). `writes.py` walks the recorded graph once. For a write it
calls the operation's functional counterpart, found by its schema (`mutation.py`), and computes the root's
new value by the inverses of the steps (`scatters.py`); a view that is read after a write is recomputed.
``as_strided`` is replaced by equal slices, diagonals and permutations, or by an index. Nothing is
retraced, so nodes keep their tags, and a ``detach`` (tagged ``cut``) remains one. If an operation
still writes after that, ``tracing/purify.py`` refuses it, with its source line.

A graph does not determine everything that autograd would do: gradients may be switched off, and there are
autograd.Functions, ``detach_``, writes through a detached alias, and writes that autograd refuses. In
these cases derivatives run the function itself again (``Program.retrace``; `grad_dependent_ops.py`).

``x[i]`` with a tensor for i is a view in eager torch. A trace does not know where this view lies, so it
records a lookup, and refuses operations whose results would differ from those on a view (`picked.py`).

torch's batch norms write to their arguments, and most of their schemas do not state this. `batch_norm.py`
replaces each by one pure operation, and lerps of the running statistics. It also decomposes batch norm if
a derivative needs the statistics as functions of the input: torch's own formulas treat them as constants,
and are wrong from the second derivative on in forward mode, and from the third in reverse mode.

torch's ``grouped_mm`` leaves rows of no group as memory was: `grouped_products.py` has one that does not.
"""
