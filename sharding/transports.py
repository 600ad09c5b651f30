"""The public interface of transports, which move values between ranks: ``Mesh(axes, transport=...)``.

A `Transport` is given a reshard step, the local values of the coordinates that this process runs, and the
graph to which it appends operations. `SimulatedTransport` runs all ranks in one process;
`ProcessGroupTransport` runs this process's rank of a process group. To write one of your own, derive from
either and override ``step``.
"""

from torchard.sharding.layouts.collective_ops import CollectiveOp, CollectiveVisitor
from torchard.sharding.lowering.lower import Fetch, Lowering, Transport, Value
from torchard.sharding.lowering.process_group_transport import ProcessGroupTransport
from torchard.sharding.lowering.simulated_transport import SimulatedTransport

__all__ = [
    "CollectiveOp",
    "CollectiveVisitor",
    "Fetch",
    "Lowering",
    "ProcessGroupTransport",
    "SimulatedTransport",
    "Transport",
    "Value",
]
