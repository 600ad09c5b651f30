"""Where data lives on a mesh, and what crosses the network."""

from torchard.sharding.agree import PlanMismatch, ReplicaMismatch
from torchard.sharding.constrain import constrain
from torchard.sharding.mesh import Mesh, MeshError
from torchard.sharding.place import MeshTensor, PlacementError
from torchard.sharding.redistribute import place, redistribute
from torchard.sharding.rules import register_rule
from torchard.sharding.shard import shard
from torchard.sharding.spec import P, SpecError

__all__ = [
    "Mesh",
    "MeshError",
    "MeshTensor",
    "P",
    "PlacementError",
    "PlanMismatch",
    "ReplicaMismatch",
    "SpecError",
    "constrain",
    "place",
    "redistribute",
    "register_rule",
    "shard",
]
