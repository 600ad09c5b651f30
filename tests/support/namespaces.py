"""Two hosts on one machine: namespaces joined by a cable, each with names and processes of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Host", "Unavailable", "two_hosts"]

# Of one command that sets something up, in seconds.
PATIENCE = 20
# What a process of a host runs in: its network, its names, its processes. Who kills the outermost process
# kills the host, with all that runs on it.
_UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
_SETTLE = """
    echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"
"""

# Of <sched.h> and <sys/prctl.h>.
_NETWORK, _MOUNTS, _NAMES, _PROCESSES = 0x40000000, 0x00020000, 0x04000000, 0x20000000
_DIE_WITH_PARENT = 1

_numbers = itertools.count()


class Unavailable(Exception):
    """This machine lets nobody make namespaces; says what is missing."""


@dataclass(frozen=True)
class Host:
    """One of the two.

    Attributes:
        name: of its network namespace, and the host name its processes see.
        address: by which the other one reaches it.
        book: the file in which both look up names of hosts.
    """

    name: str
    address: str
    book: Path

    # Of its end of the cable; namespaces do not share names of interfaces.
    interface = "veth0"

    @contextlib.contextmanager
    def running(
        self, command: Sequence[str], env: Mapping[str, str], output: Any
    ) -> Iterator[subprocess.Popen[str]]:
        """A command on this host, what it prints going to a file or pipe; ends with the block."""
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        with subprocess.Popen(
            self.entered(*command),
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
            **pipes,
        ) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def entered(self, *command: str) -> list[str]:
        """The command that runs a command on this host."""
        into = ["ip", "netns", "exec", self.name, *_UNSHARE, _SETTLE]
        return [*into, self.name, str(self.book), *command]

    def enter(self) -> None:
        """Go on in a new process of this host, its outermost, which takes the place of this one."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as network:
            _called(libc.setns(network.fileno(), _NETWORK))
        _called(libc.unshare(_MOUNTS | _NAMES | _PROCESSES))
        outermost = os.fork()
        if outermost:
            os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(outermost, 0)[1])))
        _called(libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL))
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "proc", "proc", "/proc")
        _run("mount", "--bind", str(self.book), "/etc/hosts")
        socket.sethostname(self.name)

    def cut_off(self) -> None:
        """Pull the cable: nothing is sent any more, and nobody is told."""
        _run("ip", "-n", self.name, "link", "set", self.interface, "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else.

    Raises:
        Unavailable: a program or a privilege is missing.
    """
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} (of iproute2, util-linux) not found")
    stem = f"torchard-{os.getpid()}-{next(_numbers)}"
    with contextlib.ExitStack() as stack:
        book = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        one, other = (Host(f"{stem}-{c}", f"10.231.77.{i}", book) for i, c in enumerate("ab", 1))
        hosts = one, other
        book.write_text("127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in hosts))
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.name)
                stack.callback(_run, "ip", "netns", "del", host.name)
            _connect(one, other)
            _run(*one.entered("true"))
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()
            raise Unavailable(f"network, pid and uts namespaces need root: {said}") from error
        yield hosts


def _connect(one: Host, other: Host) -> None:
    ends = [one.interface, "type", "veth", "peer", "name", other.interface, "netns", other.name]
    _run("ip", "-n", one.name, "link", "add", *ends)
    for host in (one, other):
        _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _run("ip", "-n", host.name, "link", "set", interface, "up")


def _called(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "no namespace for a host")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
