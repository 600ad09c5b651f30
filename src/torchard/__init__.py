"""torchard: model execution as function composition, for PyTorch.

A model is a pure function over a pytree of parameters; how it runs (sharded, rematerialised,
fused, compiled) is said beside it, by transforms. This module re-exports the public names; the
three folders behind it are `torchard.functional`, `torchard.sharding` and `torchard.kernels`.
"""

from torchard.functional import nn, optim, random
from torchard.functional.errors import (
    DonatedError,
    PurityError,
    RetraceWarning,
    StaticArgumentError,
)
from torchard.functional.jit import jit
from torchard.functional.module import functionalize
from torchard.functional.signature import ShapeDtype
from torchard.functional.testing import verify
from torchard.functional.trace import name, scope, trace
from torchard.sharding import (
    Activations,
    Colwise,
    Mesh,
    MeshError,
    MeshTensor,
    P,
    Pairwise,
    PlacementError,
    PlanMismatch,
    ReplicaMismatch,
    Rowwise,
    SequenceParallel,
    SpecError,
    Style,
    clip_by_global_norm,
    constrain,
    from_dtensor,
    global_norm,
    parallelize,
    place,
    redistribute,
    register_rule,
    shard,
    to_dtensor,
)

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "Colwise",
    "DonatedError",
    "Mesh",
    "MeshError",
    "MeshTensor",
    "P",
    "Pairwise",
    "PlacementError",
    "PlanMismatch",
    "PurityError",
    "ReplicaMismatch",
    "RetraceWarning",
    "Rowwise",
    "SequenceParallel",
    "ShapeDtype",
    "SpecError",
    "StaticArgumentError",
    "Style",
    "__version__",
    "clip_by_global_norm",
    "constrain",
    "from_dtensor",
    "functionalize",
    "global_norm",
    "jit",
    "name",
    "nn",
    "optim",
    "parallelize",
    "place",
    "random",
    "redistribute",
    "register_rule",
    "scope",
    "shard",
    "to_dtensor",
    "trace",
    "verify",
]
