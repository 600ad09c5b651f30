"""What a pure function is, and what can be done to any of them.

Data goes through the folders in this order: `tracing` makes a program of a function (`guards` and
`effects` see to what it reads and writes), `derivatives` differentiates it, `remat` decides what a
backward keeps, `execution` turns it into code, `engine` is how all of that is called. `programs` says
what a program is, `reports` what can be told of one. Imports neither `torchard.sharding` nor
`torchard.kernels`.

Modules of this folder are the transforms and what users call; a function that is called as its module
is is what ``from torchard.functional import checkpoint`` gives.
"""

from torchard.functional.checkpoint import checkpoint
from torchard.functional.jit import jit
from torchard.functional.module import Functional, functionalize
from torchard.functional.saved_residuals import saved_residuals
from torchard.functional.trace import name, scope, trace
from torchard.functional.verify import verify

__all__ = [
    "Functional",
    "checkpoint",
    "functionalize",
    "jit",
    "name",
    "saved_residuals",
    "scope",
    "trace",
    "verify",
]
