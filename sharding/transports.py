"""What moves values between ranks, for authors of transports: ``Mesh(axes, transport=...)``.

A `Transport` is given a reshard step, the local values of the coordinates that this process runs, and the
graph to which it adds its operations. `Lockstep` has all ranks in one process, `Wire` this rank of a
process group; deriving from one of them and overriding ``step`` is the least that can be done.
"""

from torchard.sharding.layouts.collective_ops import CollectiveOp, CollectiveVisitor
from torchard.sharding.lowering.lower import Fetch, Lowering, Transport, Value
from torchard.sharding.lowering.process_group_transport import Wire
from torchard.sharding.lowering.simulated_transport import Lockstep

__all__ = [
    "CollectiveOp",
    "CollectiveVisitor",
    "Fetch",
    "Lockstep",
    "Lowering",
    "Transport",
    "Value",
    "Wire",
]
