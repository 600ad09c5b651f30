"""One process of a job: it joins the others, and ends with a single message for all of them.

However a run ends early (Ctrl-C, a killed rank, a rank that hangs, disagrees or fails), exactly one rank
prints a message, which names the rank and what it was doing, and all ranks end at once. For this a thread
handles signals, because the main thread may be blocked inside a collective for as long as its timeout;
and the ranks agree through the store on the one that prints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

# Ctrl-C during torch's import ends the process without a message: nothing has happened yet.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch.distributed as dist  # noqa: E402

__all__ = ["Job", "attempt", "job"]

# Texts of torch.distributed's errors when a peer has ended or does not answer in time.
LOST = ("connection closed", "connection reset", "broken pipe", "gloo", "timed out", "timeout")
# A process that is killed loses its connections a moment before it ends.
GRACE = 2.0


class Job:
    """This process among those that torchrun started; without torchrun it is the only one.

    Attributes:
        rank, size: the rank of this process, and the number of ranks.
        doing: what this rank is doing, for the message: "step 3 of 100".
        awaited: what it is waiting for from the other ranks, for the message.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.timeout = timedelta(seconds=timeout)
        self.doing = "the start"
        self.awaited = "the start of the others"
        self._store: dist.Store | None = None
        self._silent = False  # the store did not answer a request in time

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def join(self) -> None:
        """Connect to the other ranks; without torchrun, do nothing."""
        if "RANK" not in os.environ:
            return
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = self._connected(self.leads and not by_agent)
        # A second connection: the first may be blocked when the message has to be printed.
        self._store = self._connected(False)
        self._store.set(f"job/process/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )

    def _connected(self, serves: bool) -> dist.Store:
        """The store. Under --max-restarts it outlives the ranks, so each attempt has keys of its own."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, self.size, serves, self.timeout, wait_for_workers=False)
        return dist.PrefixStore(f"attempt_{attempt()}", store)

    # -- ending -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """End a rank whose work is done; the others may not be done yet."""
        if self._store is None:
            return
        # From here on the others must not count it as lost.
        self._store.delete_key(f"job/process/{self.rank}")
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: torch's threads that still run can abort the interpreter during its shutdown.
        os._exit(0)

    def end(self, message: str, code: int = 1) -> NoReturn:
        """End this process; the first rank to do so prints the message."""
        if self._first():
            self._say(message)
        # Not sys.exit: a broken process group can hang or abort during the interpreter's shutdown.
        os._exit(code)

    def signalled(self, number: int) -> NoReturn:
        """End because of a signal, from the user or from torchrun after another rank died."""
        if number == signal.SIGINT:
            self.end(f"interrupted in {self.doing}; stopped.", 128 + number)
        gone = self._gone()
        if gone:
            self.end(self._bereft(gone))
        name = signal.Signals(number).name
        self.end(f"asked to stop ({name}) in {self.doing}; stopped.", 128 + number)

    def failed(self, error: Exception) -> NoReturn:
        """End because of an exception."""
        lost = self._store is not None and any(text in str(error).lower() for text in LOST)
        # A CollectiveError names the collective of the plan.
        self.awaited = getattr(getattr(error, "collective", None), "title", self.awaited)
        gone = self._gone(GRACE if lost else 0)
        if gone:
            self.end(self._bereft(gone))
        if lost:
            self._unanswered(error)
        if "TRACEBACK" in os.environ:
            traceback.print_exception(error)
        who = f"rank {self.rank}, " if self.size > 1 else ""
        self.end(
            f"{type(error).__name__} ({who}{self.doing}, {_place(error)}): {error}\n"
            "Set TRACEBACK=1 to see where it came from."
        )

    def _bereft(self, gone: dict[int, int]) -> str:
        """The message when other ranks have ended."""
        verb = "is gone" if len(gone) == 1 else "are gone"
        return (
            f"{_named(gone)} {verb} (killed, or out of memory?): rank {self.rank} was in "
            f"{self.doing}, waiting for {self.awaited}. Stopped."
        )

    def _unanswered(self, error: Exception) -> NoReturn:
        """End because other ranks are lost or do not answer, and kill those on this machine."""
        others = self._others()
        if self._first():
            transport = re.sub(r"^\[[^\]]*\] *", "", str(error.__cause__ or error).splitlines()[0])
            late = f"no answer from {_named(others)} within {self.timeout.total_seconds():g} s"
            timed_out = any(text in transport.lower() for text in ("timed out", "timeout"))
            problem = late if timed_out else f"lost {_named(others)}"
            self._say(
                f"{problem}: rank {self.rank} was in {self.doing}, waiting for {self.awaited}. "
                f"Stopped. ({transport})"
            )
            # A hanging process ignores SIGTERM, and torchrun would wait half a minute for it.
            for pid in others.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _say(self, message: str) -> None:
        sys.stdout.flush()
        # The line of a progress bar may not have ended.
        print(f"\n{self.name}: {message}", file=sys.stderr, flush=True)

    def _others(self) -> dict[int, int]:
        """The process ids of the other ranks on this machine."""
        pids = {}
        for rank in set(range(self.size)) - {self.rank}:
            host, pid = self._asked(functools.partial(self._process, rank), ("", 0))
            if host == socket.gethostname():
                pids[rank] = int(pid)
        return pids

    def _process(self, rank: int) -> tuple[str, str]:
        """The host and process id of a rank, empty once it has left."""
        key = f"job/process/{rank}"
        if self._store is None or not self._store.check([key]):
            return "", "0"
        host, pid = self._store.get(key).decode().split()
        return host, pid

    def _asked(self, question: Callable[[], Any], default: Any) -> Any:
        """The store's answer; the default if the store has ended as well, or its host is unreachable.

        On an unreachable host the store's own timeout has no effect: a request waits as long as TCP does.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except RuntimeError:
                answers.put(default)

        if not self._silent:
            threading.Thread(target=ask, daemon=True).start()
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=GRACE)
            self._silent = True
        return default

    def _gone(self, seconds: float = 0) -> dict[int, int]:
        """The ranks on this machine that have ended; waits up to some seconds for the first."""
        deadline = time.monotonic() + seconds
        while True:
            gone = {rank: pid for rank, pid in self._others().items() if not _alive(pid)}
            if gone or time.monotonic() >= deadline:
                return gone
            time.sleep(0.02)

    def _first(self) -> bool:
        """Whether this rank is the one that prints the message."""
        store = self._store
        return store is None or bool(self._asked(lambda: store.add("job/spoken", 1) == 1, True))


def attempt() -> int:
    """How often torchrun has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _named(processes: dict[int, int]) -> str:
    return " and ".join(f"rank {r} (process {pid})" for r, pid in processes.items()) or "the others"


def _alive(pid: int) -> bool:
    """Whether a process of this machine is running, and not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _place(error: BaseException) -> str:
    """The innermost line of the examples in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parent
    ours = [f for f in frames if Path(f.filename).parent == here and f.filename != __file__]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _listen(job: Job) -> None:
    """Handle SIGINT and SIGTERM in a thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Python writes the signal's number to the pipe at once; the handler itself does nothing.
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write)

    def answer() -> None:
        for number in iter(lambda: os.read(read, 1)[0], None):
            if number in (signal.SIGINT, signal.SIGTERM):
                job.signalled(number)

    threading.Thread(target=answer, name="signals", daemon=True).start()


@contextlib.contextmanager
def job(name: str, timeout: float) -> Iterator[Job]:
    """The job that this process is part of; an error inside ends it with a single message."""
    here = Job(name, timeout)
    _listen(here)
    try:
        here.join()
        yield here
        here.leave()
    except Exception as error:  # any error ends the job with a message
        here.failed(error)
