"""One process of a job: it joins the others, and leaves with one clear message for all of them.

However a run ends early (Ctrl-C, a killed rank, a rank that hangs, disagrees or fails), exactly one rank
says so, in a sentence that names the rank and what was going on, and every rank is gone at once. That
asks for two things that Python does not give by itself: signals are answered by a thread, because the
main thread may be blocked inside a collective for as long as its timeout; and the ranks agree through
the store on who speaks.
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

# Ctrl-C while torch is being loaded just ends the process: nothing has happened yet.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch.distributed as dist  # noqa: E402

__all__ = ["Job", "job"]

# What torch.distributed's errors say when the other side is gone, or silent for too long.
LOST = ("connection closed", "connection reset", "broken pipe", "gloo", "timed out", "timeout")
# A process that is killed loses its connections a moment before it is gone.
GRACE = 2.0


class Job:
    """This process's rank among those torchrun started; alone without torchrun.

    Attributes:
        rank, size: of this process, and how many there are.
        doing: what to say if the job ends now: "step 3 of 100".
        awaited: what a rank that does `doing` waits for from the others.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.timeout = timedelta(seconds=timeout)
        self.doing = "the start"
        self.awaited = "the start of the others"
        self._store: dist.Store | None = None
        self._silent = False  # the store has left a question unanswered

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def join(self) -> None:
        """Meet the other ranks; nothing to do without torchrun."""
        if "RANK" not in os.environ:
            return
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = self.leads and not by_agent
        store = dist.TCPStore(host, port, self.size, serves, self.timeout, wait_for_workers=False)
        # A connection of its own: the first may be busy waiting when the last words are due.
        self._store = dist.TCPStore(host, port, is_master=False, timeout=self.timeout)
        self._store.set(f"job/process/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )

    # -- ending -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """This rank's work is done; the others may have more to do."""
        if self._store is None:
            return
        # From here on nobody is to miss it.
        self._store.delete_key(f"job/process/{self.rank}")
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of torch's that still run can abort the interpreter while it is being torn down.
        os._exit(0)

    def end(self, message: str, code: int = 1) -> NoReturn:
        """Leave for good; the first rank to come here speaks for all."""
        if self._first():
            self._say(message)
        # Not sys.exit: a broken process group can hang or abort while it is being torn down.
        os._exit(code)

    def signalled(self, number: int) -> NoReturn:
        """Leave because of a signal: the user's, or torchrun's after another rank died."""
        if number == signal.SIGINT:
            self.end(f"interrupted in {self.doing}; stopped.", 128 + number)
        gone = self._gone()
        if gone:
            self.end(self._bereft(gone))
        name = signal.Signals(number).name
        self.end(f"asked to stop ({name}) in {self.doing}; stopped.", 128 + number)

    def failed(self, error: Exception) -> NoReturn:
        """Leave because of an exception."""
        lost = self._store is not None and any(sign in str(error).lower() for sign in LOST)
        # torchard's error says which collective of the plan it was.
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
        verb = "is gone" if len(gone) == 1 else "are gone"
        return (
            f"{_named(gone)} {verb} (killed, or out of memory?): rank {self.rank} was in "
            f"{self.doing}, waiting for {self.awaited}. Stopped."
        )

    def _unanswered(self, error: Exception) -> NoReturn:
        others = self._others()
        if self._first():
            transport = re.sub(r"^\[[^\]]*\] *", "", str(error.__cause__ or error).splitlines()[0])
            late = f"no answer from {_named(others)} within {self.timeout.total_seconds():g} s"
            waited = any(sign in transport.lower() for sign in ("timed out", "timeout"))
            said = late if waited else f"lost {_named(others)}"
            self._say(
                f"{said}: rank {self.rank} was in {self.doing}, waiting for {self.awaited}. "
                f"Stopped. ({transport})"
            )
            # What hangs does not end when asked to, and torchrun would ask it for half a minute.
            for pid in others.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _say(self, message: str) -> None:
        sys.stdout.flush()
        # On a line of its own: the progress bar has not ended its line.
        print(f"\n{self.name}: {message}", file=sys.stderr, flush=True)

    def _others(self) -> dict[int, int]:
        """Process ids of the other ranks on this machine."""
        found = {}
        for rank in set(range(self.size)) - {self.rank}:
            host, pid = self._asked(functools.partial(self._process, rank), ("", 0))
            if host == socket.gethostname():
                found[rank] = int(pid)
        return found

    def _process(self, rank: int) -> tuple[str, str]:
        """Where a rank runs, as long as it may be missed."""
        key = f"job/process/{rank}"
        if self._store is None or not self._store.check([key]):
            return "", "0"
        host, pid = self._store.get(key).decode().split()
        return host, pid

    def _asked(self, question: Callable[[], Any], default: Any) -> Any:
        """What the store answers; the default if it has gone, too, or is on a host that is cut off.

        There its own timeouts do not help: it waits for an answer as long as TCP does.
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
        """The others that have ended, as soon as there are any, or after some seconds."""
        last = time.monotonic() + seconds
        while True:
            gone = {rank: pid for rank, pid in self._others().items() if not _alive(pid)}
            if gone or time.monotonic() >= last:
                return gone
            time.sleep(0.02)

    def _first(self) -> bool:
        """Whether this rank is the one that speaks."""
        store = self._store
        return store is None or bool(self._asked(lambda: store.add("job/spoken", 1) == 1, True))


def _named(processes: dict[int, int]) -> str:
    return " and ".join(f"rank {r} (process {pid})" for r, pid in processes.items()) or "the others"


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that waits to be reaped does not."""
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
    """The last line of this example that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parent
    ours = [f for f in frames if Path(f.filename).parent == here and f.filename != __file__]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _listen(job: Job) -> None:
    """Answer SIGINT and SIGTERM from a thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Python writes the number to the pipe at once; the handler itself has nothing left to do.
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write)

    def answer() -> None:
        for number in iter(lambda: os.read(read, 1)[0], None):
            if number in (signal.SIGINT, signal.SIGTERM):
                job.signalled(number)

    threading.Thread(target=answer, name="signals", daemon=True).start()


@contextlib.contextmanager
def job(name: str, timeout: float) -> Iterator[Job]:
    """The job this process is part of; whatever goes wrong inside ends it with one message."""
    here = Job(name, timeout)
    _listen(here)
    try:
        here.join()
        yield here
        here.leave()
    except Exception as error:  # whatever it is, it is said and ends the job
        here.failed(error)
