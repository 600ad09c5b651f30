"""Processes with a gloo process group that stay alive, and run functions on demand."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankPool"]

# After its pipe is closed; more than enough for a rank that is not waiting for another.
_SECONDS_TO_END = 1.0

_AT_THE_START = (
    "\nThe ranks did not start. Each imports the script that made the RankPool, so the script's own "
    "code must be below `if __name__ == \"__main__\":`."
)


class RankError(AssertionError):
    """A function failed on a rank of a `RankPool`, or a rank did not answer; it has every traceback.

    >>> from torchard.testing import RankError
    >>> isinstance(RankError("rank 1: ..."), AssertionError)
    True
    """


class RankPool:
    """Ranks of a gloo process group on this machine, one process each, to run functions on.

    The processes start at the first call and stay until the pool is closed, so that a call costs
    milliseconds. After a failure they are restarted, since ranks may have stopped at different places.

    Args:
        size: the number of ranks.
        timeout: seconds that a call may take, the start of the processes included.

    Raises:
        ValueError: the size is below 1.

    >>> from torchard.testing import RankPool
    >>> import torch.distributed
    >>> with RankPool(2) as ranks:
    ...     ranks(torch.distributed.get_rank)
    [0, 1]
    """

    def __init__(self, size: int = 2, *, timeout: float = 120.0) -> None:
        if size < 1:
            raise ValueError(f"size: a pool needs at least one rank, not {size}")
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on every rank.

        Args:
            fn: a function at the top of a module, which each rank loads from its file; the default
                process group exists when it runs.
            args: its arguments, the same on all ranks; pickled.

        Returns:
            What it returned on each rank, in order.

        Raises:
            ValueError: fn is not at the top of a module.
            RankError: it raised on a rank, a rank did not return within the timeout, or did not start.
        """
        message = pickle.dumps((*_address(fn), sys.path, args))
        deadline = time.monotonic() + self.timeout
        if not self._processes:
            self._start()
            self._answers(deadline, _AT_THE_START)
        for pipe in self._pipes:
            pipe.send_bytes(message)
        return self._answers(deadline)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_SECONDS_TO_END)
            process.kill()  # it may wait for a rank that failed
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._pipes, self._processes, self._folder = [], [], None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        # Not forked from this process, whose threads would be lost; from a server that loads torch once.
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context(
            "forkserver" if "forkserver" in methods else "spawn"
        )
        if "forkserver" in methods:
            context.set_forkserver_preload(["torchard"])
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, str(store), self.timeout), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answers(self, deadline: float, hint: str = "") -> list[Any]:
        """The results of the ranks; a pool in which one failed is closed."""
        answers = [self._answer(rank, deadline) for rank in range(self.size)]
        failed = [f"rank {rank}: {text}" for rank, (right, text) in enumerate(answers) if not right]
        if failed:
            self.close()
            raise RankError("\n".join(failed) + hint)
        return [value for _, value in answers]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        """Whether a rank returned in time, and its result or else the message."""
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return False, f"no answer within {self.timeout:g} s (RankPool(timeout=))"
        try:
            right, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(1)
            return False, f"the process ended with exit code {self._processes[rank].exitcode}"
        return right, value


def _address(fn: Callable[..., Any]) -> tuple[str, str | None, str]:
    """The module, its file and the name in it by which ranks find a function."""
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    found: Any = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not fn:
        raise ValueError(
            f"fn: {name or fn!r} is not defined at the top level of a module, so other processes "
            "cannot load it. Define it at the top level of the test's file, and pass the values that "
            "it needs as arguments."
        )
    return module, file and os.path.abspath(file), name


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    """The loop of each process: run the functions that arrive until the pipe is closed."""
    pipe.send_bytes(pickle.dumps((True, None)))  # it has started
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            module, file, name, path, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _load(module, file, name, path)(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _load(module: str, file: str | None, name: str, path: list[str]) -> Any:
    """A function at the top of a module, whose file is executed once."""
    sys.path[:] = path
    if module not in sys.modules and file is None:
        importlib.import_module(module)
    elif module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, str(file))
        assert spec is not None and spec.loader is not None
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
