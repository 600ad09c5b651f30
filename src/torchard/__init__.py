"""torchard: model execution as function composition, for PyTorch.

A model is a pure function over a pytree of parameters; how it runs (sharded, rematerialised,
fused, compiled) is said beside it, by transforms. This module re-exports the public names; the
three folders behind it are `torchard.functional`, `torchard.sharding` and `torchard.kernels`.
"""

from torchard.functional import nn, optim, random
from torchard.functional.trace import name, scope, trace
from torchard.sharding import (
    DonatedError,
    Mesh,
    MeshError,
    MeshTensor,
    P,
    PlacementError,
    PlanMismatch,
    ReplicaMismatch,
    SpecError,
    constrain,
    place,
    redistribute,
    register_rule,
    shard,
)

__version__ = "0.1.0"

__all__ = [
    "DonatedError",
    "Mesh",
    "MeshError",
    "MeshTensor",
    "P",
    "PlacementError",
    "PlanMismatch",
    "ReplicaMismatch",
    "SpecError",
    "__version__",
    "constrain",
    "name",
    "nn",
    "optim",
    "place",
    "random",
    "redistribute",
    "register_rule",
    "scope",
    "shard",
    "trace",
]
