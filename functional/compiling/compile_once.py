"""One compilation per host: a process waits while another one compiles the same graph.

Inductor keeps what it compiles on disk, by a key of its own. Ranks that start together would all miss
that cache, and compile the same graph side by side; with a lock per graph the first compiles, and the
others find the result. The lock decides who compiles, never what is used.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, Timeout  # torch requires it
from torch import fx

__all__ = ["compiled_once"]

_LOG = logging.getLogger("torchard.jit")
_TIMEOUT = 600.0  # seconds


@contextlib.contextmanager
def compiled_once(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context to compile a graph in, which one process of this host at a time enters.

    After ten minutes it is entered all the same, with a warning: the other process may have stopped in a
    debugger, and compiling twice is no mistake.
    """
    lock = _lock(f"{_key(module, inputs)}.lock")
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _lock(name: str) -> BaseFileLock | None:
    """The lock of this name, held; None if it is not to be had."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / name, timeout=_TIMEOUT)
        lock.acquire()
        return lock
    except Timeout as error:
        _LOG.warning(
            "waited %d s for another process that compiles the same graph (%s); compiling it here, too",
            _TIMEOUT,
            error.lock_file,
        )
    except OSError as error:  # a disk that is full or read-only
        _LOG.warning("no lock to compile a graph once per host (%s); compiling it here", error)
    return None


def _folder() -> Path:
    """The folder of locks: in Inductor's cache if it has been named, else beside its default one."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return Path(named or tempfile.gettempdir()) / f"torchard_locks_{user}"


def _key(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
    """Equal for graphs that Inductor compiles to the same code."""
    kinds = [(tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in inputs]
    return hashlib.sha256(repr((torch.__version__, module.code, kinds)).encode()).hexdigest()[:32]
