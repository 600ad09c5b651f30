"""The public interface of transports, which move values between ranks: ``Mesh(axes, transport=...)``.

`SimulatedTransport` runs all ranks in one process, and needs a mesh with ``virtual=True``;
`ProcessGroupTransport` runs this process's rank of a process group, and needs a mesh without. To write
your own, derive from the one for your mesh and override ``step``. It is called while a program is
lowered, once for each reshard step, and appends operations to the graph that the ranks run:

- ``low.emit.call(target, *args)`` appends a call of an operation, and returns its node;
- ``step.kind`` is the name of its collective ("all_gather"; "slice" sends nothing), ``step.axes`` are
  the mesh axes, ``step.reduction`` is "sum", "max", "min" or None, ``step.collective`` is the
  `CollectiveOp`;
- ``values`` has a `Value` for each distinct coordinate that this process runs; its ``get()`` returns a
  node, the local value, and waits for it if a collective is in flight. The keys are those of
  ``step.before``; the result is a dict of this form, by the keys of ``step.after``;
- ``val`` is a fake tensor, which has the dtype, the device and the global shape of the value.

The plan may merge steps into one collective, by ``bucket``. If ``step`` is overridden, ``bucket`` calls
it for each of them, so that they are sent one by one; override ``bucket`` to merge them. Neighbours
along a split dim (in convolutions and pools) are read by ``fetch``, not by steps.

>>> import torch, torchard as ta
>>> from torchard.sharding.transports import SimulatedTransport, Value
>>> class Halved(SimulatedTransport):                        # sums are sent in half precision
...     def step(self, low, step, values, val):
...         if step.reduction != "sum":
...             return super().step(low, step, values, val)
...         cast = torch.ops.prims.convert_element_type.default
...         half = {k: Value(low.emit.call(cast, v.get(), torch.half)) for k, v in values.items()}
...         sums = super().step(low, step, half, val.half())
...         return {k: Value(low.emit.call(cast, v.get(), val.dtype)) for k, v in sums.items()}
>>> mesh = ta.Mesh({"tp": 2}, virtual=True, transport=Halved())
>>> specs = ta.P(None, "tp"), ta.P("tp", None)
>>> ta.shard(torch.matmul, mesh, in_specs=specs)(torch.full((1, 4), 1.0001), torch.ones(4, 1)).full()
tensor([[4.]])
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
