"""One collective in a rank's local graph: the call that issues it and the call that waits for it.

Both are tagged with the plan's collective, so that an error raised by either names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tagging import put
from torchard.functional.programs.tags import COLLECTIVE, PEERS, STAGE
from torchard.functional.torch_internals.operators import c10d
from torchard.sharding.layouts.tags import OVER
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.values.mesh import Mesh

__all__ = ["Channel"]

# The number of ranks that a message lists.
_LISTED = 8


class Channel:
    """The collective that is being lowered, over a process group: that along some axes, or another.

    A virtual mesh has none: what a rank would run names the axes, and is read, not run.
    """

    def __init__(self, low: Lowering, axes: Sequence[str], group: Any = None) -> None:
        self.low = low
        self.tags: dict[Any, Any] = {COLLECTIVE: low.record}
        self.process_group, self.group = group, "·".join(axes)
        if not low.mesh.virtual:
            self._over(low.mesh.group(axes) if group is None else group)

    def _over(self, group: Any) -> None:
        self.process_group, self.group = group, group.group_name
        ranks = tuple(dist.get_process_group_ranks(group))
        self.tags |= {PEERS: _peers(self.low.mesh, group, ranks), OVER: ranks}

    def issue(self, name: str, x: fx.Node, *args: Any) -> fx.Node:
        return self.call("issue", getattr(c10d, name).default, x, *args, self.group)

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call("wait", c10d.wait_tensor.default, x)

    def call(self, stage: str, target: Any, *args: Any) -> fx.Node:
        """A call in which other ranks take part: "issue" or "wait"."""
        node = self.low.emit.call(target, *args)
        put(node, {**self.tags, STAGE: stage})
        return node


def _peers(mesh: Mesh, group: Any, members: Sequence[int]) -> str:
    """A sentence that names the participating ranks and the timeout."""
    assert mesh.device_mesh is not None
    ranks = list(map(str, members))
    if len(ranks) > _LISTED:
        ranks[_LISTED - 1 :] = [f"{len(ranks) - _LISTED + 1} more"]
    listed = " and ".join(filter(None, [", ".join(ranks[:-1]), ranks[-1]]))
    timeout = internals.timeout_of(group, mesh.device_mesh.device_type)
    waits = "" if timeout is None else f" and wait {timeout.total_seconds():g} s for one another"
    return f"Ranks {listed} of {mesh} take part{waits}."
