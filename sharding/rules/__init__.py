"""Factor rules: how each operation can be split. Importing this package registers them all.

`registry/` holds the registry, and the view of a call that a rule and its emitter get. The rules of
torch's operations are in two folders, one file per family: `compute/` for operations that compute new
values, `data_movement/` for those that rearrange, read or write elements. The other files have the rules
of torchard's own operations: fused kernels, shard_map's collectives, and blocks of a dim with their
windows.
"""

from torchard.sharding.rules import (
    blocks,
    compute,
    data_movement,
    effects,
    fused,
    loops,
    manual_collectives,
)
from torchard.sharding.rules.registry import (
    REGISTRY,
    Call,
    Local,
    OpRule,
    find,
    lookup,
    register_rule,
    rule_of,
)

__all__ = [
    "REGISTRY",
    "Call",
    "Local",
    "OpRule",
    "blocks",
    "compute",
    "data_movement",
    "effects",
    "find",
    "fused",
    "lookup",
    "loops",
    "manual_collectives",
    "register_rule",
    "rule_of",
]
