"""One round of messages in a group: a rank sends to one ahead of it, and receives from one behind it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from torchard.sharding.values.host_links import HostLink, Listener, linked

__all__ = ["Round"]


class Round:
    """Messages by gloo at first; then, in each direction, by a link if both ranks are on one host.

    Args:
        backend: that of a group which sends the memory of hosts.
        tag: for this round's messages alone.
        peers: the members of the circle, as numbered in the group.
        own: the position of this rank among them.
        distance: how far ahead it sends, and from how far behind it receives.
        most: the bytes of a message, at most.

    Attributes:
        source: the position of the rank that it receives from.
    """

    def __init__(
        self, backend: Any, tag: int, peers: Sequence[int], own: int, distance: int, most: int
    ) -> None:
        self.source = (own - distance) % len(peers)
        self._most = most
        ends = peers[self.source], peers[(own + distance) % len(peers)]
        self._ahead = _OverGloo(backend, tag, ends, most)
        self._back = _OverGloo(backend, tag, ends[::-1], most)
        self._listener: Listener | None = None
        self._in: HostLink | None = None
        self._out: HostLink | None = None

    # -- making links: a step is taken by all ranks before the next one ----------------------------

    def ask(self, _: datetime.timedelta) -> None:
        """Tell both ranks an address."""
        self._listener = Listener()
        for way in (self._ahead, self._back):
            way.listen()
        for way in (self._ahead, self._back):
            way.send(self._listener.address)

    def answer(self, patience: datetime.timedelta) -> None:
        """Connect to the rank that is sent to, if it is on this host, and tell it."""
        assert self._listener is not None
        self._ahead.receive(patience)
        self._out = linked(self._listener.address, self._back.receive(patience).rstrip(b"\0"))
        for way in (self._ahead, self._back):
            way.end(patience)
        self._ahead.listen()
        self._ahead.send(b"" if self._out is None else b"connected")

    def settle(self, patience: datetime.timedelta) -> None:
        """Accept the connection of the rank that sends, if it has made one."""
        assert self._listener is not None
        if self._ahead.receive(patience).rstrip(b"\0"):
            self._in = self._listener.accept()
        self._ahead.end(patience)
        self._listener.close()

    @property
    def by_links(self) -> bool:
        """Whether gloo carries no messages any more."""
        return self._in is not None and self._out is not None

    def close(self) -> None:
        """End the links."""
        for link in (self._in, self._out):
            if link is not None:
                link.close()

    # -- a message ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """Post the receive."""
        if self._in is None:
            self._ahead.listen()

    def send(self, message: bytes) -> None:
        """Begin to send."""
        (self._ahead if self._out is None else self._out).send(message)

    def receive(self, patience: datetime.timedelta) -> bytes:
        """Wait for the message, which may end in zeros."""
        if self._in is None:
            return self._ahead.receive(patience)
        return self._in.receive(self._most, patience.total_seconds())

    def end(self, patience: datetime.timedelta) -> None:
        """Wait until what was sent is on its way."""
        if self._out is None:
            self._ahead.end(patience)


class _OverGloo:
    """Messages from one rank of a group, and to another one: the two ends."""

    def __init__(self, backend: Any, tag: int, ends: tuple[int, int], most: int) -> None:
        self.backend, self.tag, self.most = backend, tag, most
        self.source, self.to = ends
        self._sent, self._received = (torch.zeros(most, dtype=torch.uint8) for _ in "ab")
        # Accessed as plain bytes, without torch, whatever modes are active around the call.
        bytes_of: Any = memoryview
        self._out, self._in = bytes_of(self._sent.numpy()), bytes_of(self._received.numpy())
        self._sending: Any = None
        self._receiving: Any = None

    def listen(self) -> None:
        """Post the receive."""
        self._receiving = self.backend.recv([self._received], self.source, self.tag)

    def send(self, message: bytes) -> None:
        """Begin to send."""
        self._out[:] = message.ljust(self.most, b"\0")
        self._sending = self.backend.send([self._sent], self.to, self.tag)

    def receive(self, patience: datetime.timedelta) -> bytes:
        """Wait for the message."""
        self._receiving.wait(patience)
        return bytes(self._in)

    def end(self, patience: datetime.timedelta) -> None:
        """Wait until the message has been sent."""
        self._sending.wait(patience)
