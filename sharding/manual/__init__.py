"""The collectives that a user calls inside `shard_map`, and along which axes values vary.

`shard_map` is `shard` of a function that makes its arguments local, runs ``fn`` on them, and makes
the results global again. A local value that varies over an axis is *pending* over it in a way no
reduction completes (``VARYING``), so each coordinate has its own; the split keeps local residuals,
and both runtimes lower local code coordinate by coordinate. What varies is a fact of the graph
(`varying_axes.py`); along automatic axes a local value is a global one, so a local operation has
the options of its factor rule for those axes, with the same ``VARYING`` added to each
(`planning/manual_options.py`). A collective has a factor rule like any other operation: a psum over
tp is pointwise in a batch that dp splits.

Where an operation mixes values that vary differently, a ``pvary`` is inserted *while the function
runs*, ahead of autograd: a rewrite of the traced forward would come too late for a ``grad`` inside
``fn``. Transposes are type-checked (a cotangent varies as its value does), so a mixture that
escapes is an error at the next collective, at an edge or at the gradient, never a wrong number.
"""
