"""Where data lives on a mesh, and which transfers cross the network."""

from torchard.sharding.accumulate import accumulate
from torchard.sharding.checkpointing.storage import StorageError, StorageWarning, load, save
from torchard.sharding.dtensor import from_dtensor, to_dtensor
from torchard.sharding.initial import initialize
from torchard.sharding.lowering.call_order import PlanMismatch
from torchard.sharding.lowering.plan_consistency import ReplicaMismatch
from torchard.sharding.manual.collective_api import (
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
from torchard.sharding.norms import clip_by_global_norm, global_norm
from torchard.sharding.pipeline import pipeline
from torchard.sharding.pipelining.schedules import PipelineSchedule, Task
from torchard.sharding.planning.propagation.plan import IdleAxisWarning
from torchard.sharding.redistribute import place, redistribute
from torchard.sharding.register_decomposition import register_decomposition
from torchard.sharding.rule_check import register_rule
from torchard.sharding.scheduling.explained.report import PlanReport
from torchard.sharding.scheduling.schedule import Schedule
from torchard.sharding.shard import shard
from torchard.sharding.shard_map import shard_map
from torchard.sharding.stage_specs import stage_specs
from torchard.sharding.styles.parallelize import parallelize
from torchard.sharding.styles.styles import (
    Activations,
    Colwise,
    Pairwise,
    Rowwise,
    SequenceParallel,
    Style,
)
from torchard.sharding.values.constrain import constrain
from torchard.sharding.values.mesh import Mesh, MeshError
from torchard.sharding.values.place import MeshTensor, PlacementError
from torchard.sharding.values.placed_trees import full
from torchard.sharding.values.spec import P, SpecError
from torchard.sharding.values.store_allgather import ExchangeError, RankFailed

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
    "PipelineSchedule",
    "PlacementError",
    "PlanMismatch",
    "PlanReport",
    "RankFailed",
    "ReplicaMismatch",
    "Rowwise",
    "Schedule",
    "SequenceParallel",
    "SpecError",
    "StorageError",
    "StorageWarning",
    "Style",
    "Task",
    "accumulate",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "clip_by_global_norm",
    "constrain",
    "from_dtensor",
    "full",
    "global_norm",
    "initialize",
    "load",
    "parallelize",
    "pipeline",
    "place",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "redistribute",
    "register_decomposition",
    "register_rule",
    "save",
    "shard",
    "shard_map",
    "stage_specs",
    "to_dtensor",
]
