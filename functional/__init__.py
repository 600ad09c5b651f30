"""Pure functions as programs, and the transforms that need neither meshes nor kernels.

A function passes through the folders in this order: `tracing` turns it into a program (`guards` and
`effects` handle its reads and writes outside of its arguments), `derivatives` differentiates the program,
`remat` decides which values its backward saves, `execution` generates code for it, and `engine` runs
these steps when the function is called. `programs` defines programs, and `reports` describes them. This
package imports neither `torchard.sharding` nor `torchard.kernels`.

The modules directly in this folder hold the public functions. Where a function has the name of its
module, ``from torchard.functional import checkpoint`` imports the function.
"""

from torchard.functional.callbacks.calls import io_callback, pure_callback
from torchard.functional.callbacks.checked import checked
from torchard.functional.callbacks.error_if import error_if
from torchard.functional.checkpoint import checkpoint
from torchard.functional.control.associative_scan import associative_scan
from torchard.functional.control.cond import cond, switch
from torchard.functional.control.scan import fori_loop, map, scan
from torchard.functional.control.while_loop import while_loop
from torchard.functional.custom.custom_jvp import custom_jvp
from torchard.functional.custom.custom_vjp import custom_vjp
from torchard.functional.custom.linearize import (
    closure_convert,
    linear_transpose,
    linearize,
)
from torchard.functional.derivatives.value_and_grad import value_and_grad
from torchard.functional.jit import jit
from torchard.functional.module import Functional, functionalize
from torchard.functional.repeat import repeat, stack, unstack
from torchard.functional.saved_residuals import saved_residuals
from torchard.functional.trace import eval_shape, name, scope, trace, typeof

__all__ = [
    "Functional",
    "associative_scan",
    "checked",
    "checkpoint",
    "closure_convert",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "error_if",
    "eval_shape",
    "fori_loop",
    "functionalize",
    "io_callback",
    "jit",
    "linear_transpose",
    "linearize",
    "map",
    "name",
    "pure_callback",
    "repeat",
    "saved_residuals",
    "scan",
    "scope",
    "stack",
    "switch",
    "trace",
    "typeof",
    "unstack",
    "value_and_grad",
    "while_loop",
]
