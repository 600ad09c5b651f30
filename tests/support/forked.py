"""Scripts that tests run in processes of their own, forked from one that has loaded torch already.

Loading it takes longer than most of these scripts, and under torchrun every rank would do it anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from namespaces import Host
from paths import SUPPORT
from progress import Watch, computed

__all__ = ["Job", "run", "survivors", "told"]

# Seconds for a process that was killed to be gone, and for one that hangs to say where.
GONE, SAID = 30, 3
# With what scripts would import only when they come to it.
LOADED = [
    *("torchard", "matplotlib.pyplot", "pydoc_data.topics", "tqdm"),
    *("torch.distributed.run", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("torch._functorch.aot_autograd", "torch._inductor.compile_fx"),
]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(LOADED)


class Job:
    """A running script, as by ``python script arguments...`` in a folder that only it uses.

    What it started is known by that folder. All of it is killed at the end of the block, or when it
    hangs: then `late` says so, and `stdout` ends.

    Args:
        seconds: how long it may compute next to nothing.

    Attributes:
        stdin: what it reads.
        stdout: what is printed; on stderr, too, unless that goes to a file.
    """

    def __init__(
        self,
        args: Sequence[str],
        folder: Path,
        seconds: float,
        env: Mapping[str, str] | None = None,
        stderr: Path | None = None,
        host: Host | None = None,
    ) -> None:
        self.args, self.folder, self.late = args, folder, ""
        if stderr:
            stderr.touch()
        reading, out = _server.Pipe(duplex=False)
        given, writing = _server.Pipe(duplex=False)
        where = (folder, {**os.environ, **(env or {})}, host)
        process: Any = _server.Process
        self._process = process(target=_script, args=(list(args), where, (given, out, stderr)))
        self._process.start()
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        self.stdin = os.fdopen(os.dup(writing.fileno()), "w", encoding="utf-8")
        for end in (reading, out, given, writing):
            end.close()  # or there would be no end of what is printed
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(seconds,), daemon=True)
        self._watching.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watching.join()
        self._kill()
        self.stdout.close()
        self.stdin.close()
        self._process.join(GONE)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        """The exit code; what is printed has been read."""
        self._process.join()
        assert not self.late, f"{self.args} {self.late}"
        return self._process.exitcode  # type: ignore[no-any-return]

    def _watch(self, seconds: float) -> None:
        """What computes for ever is for the limit of the test to end."""
        watch = Watch(seconds, lambda: computed(self._process.pid), busy=float("inf"))
        while not self._ended.wait(seconds / 20):
            if said := watch.hangs():
                self.late = said
                for pid in self._pids():  # where its threads are, on stderr
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR2)
                self._ended.wait(SAID)
                return self._kill()

    def _pids(self) -> list[int]:
        return [self._process.pid, *survivors(self.folder)]

    def _kill(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(
    args: Sequence[str], folder: Path, seconds: float, stderr: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    with Job(args, folder, seconds, stderr=stderr) as job:
        text = job.stdout.read()
        said = stderr.read_text() if stderr else None
        assert not job.late, f"{args} {job.late}\n{text}\n{said}"
        code = job.wait()
    return subprocess.CompletedProcess(args, code, text, said)


def told(script: str, *args: Any, folder: Path, seconds: float) -> Any:
    """What a script of this folder prints last, as JSON."""
    path = SUPPORT / script
    done = run([str(path), *map(str, args)], folder, seconds, stderr=folder / "stderr")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def survivors(folder: Path) -> list[int]:
    """The processes that run in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(path)) == folder.resolve():
                found.append(int(path.parent.name))
    return found


# -- in the new process ------------------------------------------------------------------------------


def _script(
    args: list[str], where: tuple[Path, dict[str, str], Host | None], pipes: tuple[Any, Any, Any]
) -> None:
    folder, env, host = where
    given, out, stderr = pipes
    os.dup2(given.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT) if stderr else 1, 2)
    given.close()
    out.close()
    os.chdir(folder)
    if host:
        host.enter()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Forked  # type: ignore[attr-defined,misc]
    _become(args, env)


class _Forked(subprocess.Popen[str]):
    """What torchrun starts its ranks by: forked from it, they go on where they would be executed."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **options: Any) -> None:
        _python, _unbuffered, *script = args

        def instead() -> None:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as if executed; the parent waits for that
            _become(script, env)

        super().__init__(args, preexec_fn=instead, restore_signals=False, **options)


def _become(args: list[str], env: Mapping[str, str]) -> None:
    """Be what ``python args...`` would be in this environment, to the end."""
    code: Any = 1
    try:
        _as_new(args, env)
        runpy.run_path(args[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _as_new(args: list[str], env: Mapping[str, str]) -> None:
    """Nothing here is known any more of the process that this one was forked from."""
    import torch

    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2)
    # The server's way would leave semaphores to somebody who outlives this process.
    multiprocessing.set_start_method(None, force=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    warnings.resetwarnings()
    gc.enable()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = args
    sys.path.insert(0, str(Path(args[0]).parent))
