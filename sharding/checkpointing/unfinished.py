"""Directories that saves write to until their checkpoint is complete: each save has its own.

A directory belongs to a save for as long as the process that created it has it locked; the operating
system unlocks it when that process ends, even by SIGKILL. So an unlocked directory was left by a save
that did not complete, and the next save to its path removes it. On some network disks a machine does not
see the locks of another: the directory's name has a number of the machine, and no other one removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from torchard.sharding.checkpointing.storage_errors import StorageError

try:
    import fcntl
except ImportError:  # no such locks on this system: nothing is removed
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_absent", "leftovers", "publish", "reserved"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# In the place of a machine's number: the directory could not be locked.
_NO_LOCK = "0" * 8


@contextlib.contextmanager
def reserved(target: Path) -> Iterator[Path]:
    """A new directory for a save to ``target``; at the end, what still has its name is removed."""
    _remove_abandoned(target)
    with contextlib.ExitStack() as stack:
        folder = _created(target, stack)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def publish(folder: Path, target: Path) -> None:
    """Give a complete checkpoint its path.

    Raises:
        StorageError: another save was faster.
    """
    check_absent(target)
    try:
        os.rename(folder, target)
    except OSError:
        check_absent(target)
        raise


def check_absent(target: Path) -> None:
    """Check that nothing has this path.

    Raises:
        StorageError: it exists.
    """
    if os.path.lexists(target):
        raise StorageError(
            f"{target} exists already; save to a new path (with the step in its name, say), or "
            "remove it first."
        )


def leftovers(target: Path, machine: str = "[0-9a-f]{8}") -> list[Path]:
    """The directories of saves to this path that are running, or did not complete."""
    name = re.compile(rf"{re.escape(target.name)}\.{machine}-[0-9a-f]{{16}}\.unfinished")
    try:
        return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name))
    except OSError:
        return []


def _created(target: Path, stack: contextlib.ExitStack) -> Path:
    """A new directory, locked until the stack ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = _new(target, _machine())
        try:
            opened = _lock(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return _new(target, _NO_LOCK)
        # Before it was locked, another save may have taken it for an abandoned one.
        if opened is not None and folder.exists():
            stack.callback(os.close, opened)
            return folder
        if opened is not None:
            os.close(opened)


def _new(target: Path, machine: str) -> Path:
    folder = target.with_name(f"{target.name}.{machine}-{secrets.token_hex(8)}.unfinished")
    folder.mkdir()
    return folder


def _remove_abandoned(target: Path) -> None:
    """Remove the directories of saves to this path that were killed on this machine."""
    for folder in leftovers(target, _machine()):
        with contextlib.suppress(OSError):
            opened = _lock(folder)
            if opened is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(opened)


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps a directory locked; None if another has locked or removed it.

    Raises:
        OSError: it cannot be locked.
    """
    if fcntl is None:
        raise OSError("directories cannot be locked on this system")
    try:
        opened = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    except OSError:
        os.close(opened)
        raise
    return opened


def _machine() -> str:
    """A number of this machine since it was started, which containers on it share."""
    try:
        name = _BOOT_ID.read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]
