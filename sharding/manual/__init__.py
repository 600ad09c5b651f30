"""The collectives of `shard_map`, and the axes along which local values vary.

`shard_map` is `shard` of a function that makes its arguments local, runs ``fn`` on them, and makes the
results global again. In a layout, a local value that varies over an axis is pending over it with
``VARYING`` in place of a reduction: each coordinate has a different value. Residuals may be local values,
and both runtimes lower local code coordinate by coordinate. The graph determines the varying axes
(`varying_axes.py`). Along automatic axes local values are global ones, so a local operation has the
options that its factor rule gives for those axes, with the same ``VARYING`` axes added to each
(`planning/manual_options.py`). A collective has a factor rule like any other operation: a psum over tp is
pointwise in a batch that dp splits. `operand_checks.py` checks the arguments of collectives.

If an operation mixes values that vary differently, a ``pvary`` is inserted *while the function runs*,
before autograd: rewriting the traced forward would be too late for a ``grad`` inside ``fn``. Transposes
check that a cotangent varies over the same axes as its value, so a mixture that is not detected raises an
error at the next collective, at an edge or at the gradient; it never gives a wrong number.
"""
