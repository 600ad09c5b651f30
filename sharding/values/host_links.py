"""Links between two processes of one host: one-way messages through a socket of the kernel's.

gloo hands each message to a thread of its own, on both sides. Where ranks are as many as cores, that
thread spins until the thread that it has displaced releases a lock: a message may take milliseconds. A
socket is written and read by the calling thread alone.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from pathlib import Path

__all__ = ["HostLink", "Listener", "linked"]

_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/net"
# Seconds in which a process of this host answers at once: the kernel does, not the process.
_AT_ONCE = 10.0


class Listener:
    """What one other process of this host can connect to.

    Attributes:
        address: the host and the socket's name, for the other process; empty if there is no socket.
    """

    def __init__(self) -> None:
        self.address = b""
        self._socket: socket.socket | None = None
        host, name = _host(), secrets.token_hex(16)
        if not host:
            return
        made = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, made.close)
        try:
            made.bind(f"\0{name}")  # of no file system, and gone with the process
            made.listen(1)
        except OSError:
            return
        self.address = f"{host} {name}".encode()

    def accept(self) -> HostLink:
        """The link from the process that has connected."""
        assert self._socket is not None
        self._socket.settimeout(_AT_ONCE)
        return HostLink(self._socket.accept()[0])

    def close(self) -> None:
        """Let nobody connect any more."""
        if self._socket is not None:
            self._socket.close()


class HostLink:
    """One end of a link. Messages keep their order and their bounds."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        weakref.finalize(self, connected.close)

    def send(self, message: bytes) -> None:
        """Send a message; the kernel keeps it until it is received.

        Raises:
            RuntimeError: the other process has ended.
        """
        try:
            self._socket.send(message)
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from None

    def receive(self, most: int, seconds: float) -> bytes:
        """Wait for the next message.

        Args:
            most: its bytes, at most.
            seconds: how long to wait.

        Raises:
            RuntimeError: the other process has ended, or sends nothing in this time.
        """
        self._socket.settimeout(seconds)
        try:
            message = self._socket.recv(most)
        except TimeoutError:
            raise RuntimeError(f"Timed out waiting {seconds:g} s for a message") from None
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from None
        if not message:
            raise RuntimeError("Connection closed by peer")
        return message

    def close(self) -> None:
        """End the link: the other process learns of it at its next message."""
        self._socket.close()


def linked(mine: bytes, theirs: bytes) -> HostLink | None:
    """A link to the process that listens at an address, if both are on one host.

    Args:
        mine, theirs: the addresses of this process and of that one.
    """
    host, _, name = theirs.partition(b" ")
    if not name or host != mine.partition(b" ")[0]:
        return None
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connecting.settimeout(_AT_ONCE)
    try:
        connecting.connect(b"\0" + name)
    except OSError:
        connecting.close()
        return None
    connecting.settimeout(None)
    return HostLink(connecting)


def _host() -> str:
    """What is the same for all processes that can connect to this one; empty if that is unknown."""
    if not hasattr(socket, "SOCK_SEQPACKET"):
        return ""
    try:
        # Names of sockets without a file are those of a network namespace.
        return f"{_BOOT.read_text().strip()}/{os.stat(_NETWORK).st_ino}"
    except OSError:
        return ""
