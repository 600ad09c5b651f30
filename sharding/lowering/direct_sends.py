"""Sends from one rank to another, by isend and irecv, where a rank's graph is run as Python.

A functional broadcast over the pair, as compilers need it, passes through threads of gloo's on both sides
and is copied first; a direct send takes a third of the time.

A send completes once its receive is posted, and its operand is held until then. So before a rank sends to
a peer, it waits for the sends to that peer but the last few. Ranks issue sends and receives in the plan's
order, so the rank that is furthest behind waits for no other.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tags import ENDS
from torchard.functional.torch_internals.operators import c10d
from torchard.sharding.lowering.channel import Channel
from torchard.sharding.lowering.lower import Lowering, Value

__all__ = ["DirectChannel", "UnderWay"]

# By the axis and the coordinates of two ranks.
UnderWay = dict[tuple[str, int, int], deque[Value]]

_UNDER_WAY = 2  # sends to one peer


class DirectChannel(Channel):
    """The send of one value between the two ranks of a group.

    Args:
        ends: the axis, and the coordinates of the sender and of the receiver.
        under_way: the sends of this rank to the other one that it has not waited for.
    """

    def __init__(
        self, low: Lowering, ends: tuple[str, int, int], group: Any, under_way: deque[Value]
    ) -> None:
        super().__init__(low, ends[:1], group)
        self.tags |= {ENDS: ends}
        self._sends = under_way

    def send(self, x: fx.Node, to: int) -> None:
        """Begin to send a contiguous value to a member of the group."""
        while len(self._sends) >= _UNDER_WAY:
            self._sends.popleft().get()
        sent = self.call("issue", _isend, x, self.process_group, to)
        value = Value(wait=self.low.tagged(lambda: self.wait(sent)))
        self._sends.append(value)
        self.low.in_flight.append(value)

    def receive(self, buffer: fx.Node, source: int) -> fx.Node:
        """Post the receive of a value from a member of the group."""
        return self.call("issue", _irecv, buffer, self.process_group, source)

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call("wait", _wait, x)


class _Transfer(NamedTuple):
    """A value that is sent or received; without work, by a functional collective, or not at all."""

    value: torch.Tensor
    work: Any = None


def _isend(x: torch.Tensor, group: Any, to: int) -> _Transfer:
    if group is None:  # what a rank of a virtual mesh would run is read
        return _Transfer(x)
    if _is_traced(x):
        return _Transfer(c10d.broadcast.default(x, 1 - to, group.group_name))
    return _Transfer(x, _backend(group, x).send([x], to, 0))


def _irecv(buffer: torch.Tensor, group: Any, source: int) -> _Transfer:
    if group is None:
        return _Transfer(buffer)
    if _is_traced(buffer):
        return _Transfer(c10d.broadcast.default(buffer, source, group.group_name))
    return _Transfer(buffer, _backend(group, buffer).recv([buffer], source, 0))


def _wait(transfer: _Transfer) -> torch.Tensor:
    if transfer.work is None:
        value: torch.Tensor = c10d.wait_tensor.default(transfer.value)
        return value
    transfer.work.wait()
    return transfer.value


def _is_traced(x: torch.Tensor) -> bool:
    return type(x) is not torch.Tensor or internals.is_wrapped(x)


def _backend(group: dist.ProcessGroup, x: torch.Tensor) -> Any:
    return internals.backend_of(group, x.device.type)
