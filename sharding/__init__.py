"""Where data lives on a mesh, and what crosses the network."""

from torchard.sharding.agree import ReplicaMismatch
from torchard.sharding.call_order import PlanMismatch
from torchard.sharding.constrain import constrain
from torchard.sharding.dtensor import from_dtensor, to_dtensor
from torchard.sharding.exchange import ExchangeError
from torchard.sharding.initial import initialize
from torchard.sharding.mesh import Mesh, MeshError
from torchard.sharding.norms import clip_by_global_norm, global_norm
from torchard.sharding.parallelize import parallelize
from torchard.sharding.place import MeshTensor, PlacementError
from torchard.sharding.plan import IdleAxisWarning
from torchard.sharding.redistribute import place, redistribute
from torchard.sharding.rule_check import register_rule
from torchard.sharding.schedule import Schedule
from torchard.sharding.shard import shard
from torchard.sharding.shard_map import shard_map
from torchard.sharding.spec import P, SpecError
from torchard.sharding.spmd import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)
from torchard.sharding.storage import StorageError, StorageWarning, load, save
from torchard.sharding.styles import (
    Activations,
    Colwise,
    Pairwise,
    Rowwise,
    SequenceParallel,
    Style,
)

__all__ = [
    "Activations",
    "Colwise",
    "ExchangeError",
    "IdleAxisWarning",
    "Mesh",
    "MeshError",
    "MeshTensor",
    "P",
    "Pairwise",
    "PlacementError",
    "PlanMismatch",
    "ReplicaMismatch",
    "Rowwise",
    "Schedule",
    "SequenceParallel",
    "SpecError",
    "StorageError",
    "StorageWarning",
    "Style",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "clip_by_global_norm",
    "constrain",
    "from_dtensor",
    "global_norm",
    "initialize",
    "load",
    "parallelize",
    "place",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "redistribute",
    "register_rule",
    "save",
    "shard",
    "shard_map",
    "to_dtensor",
]
