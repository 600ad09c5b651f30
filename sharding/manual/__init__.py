"""The collectives of `shard_map`, and the axes along which local values vary.

`shard_map` is `shard` of a function that makes its arguments local, runs ``fn`` on them, and makes
the results global again. A local value that varies over an axis is *pending* over it in a way no
reduction completes (``VARYING``): each coordinate has its own value. The split into forward and
backward keeps local residuals, and both runtimes lower local code coordinate by coordinate. The
varying axes are determined by the graph (`varying_axes.py`); along automatic axes a local value is a
global one, so a local operation has the options of its factor rule for those axes, with the same
``VARYING`` added to each (`planning/manual_options.py`). A collective has a factor rule like any other
operation: a psum over tp is pointwise in a batch that dp splits.

Where an operation mixes values that vary differently, a ``pvary`` is inserted *while the function
runs*, before autograd: rewriting the traced forward would be too late for a ``grad`` inside ``fn``.
Transposes are type-checked (a cotangent varies as its value does), so a mixture that is not detected
is an error at the next collective, at an edge or at the gradient, never a wrong number.
"""
