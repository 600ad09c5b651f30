"""A job in which one rank fails, for tests of the errors on the others."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from torchard.functional.torch_internals import TorchDispatchMode

__all__ = ["misbehaving", "options"]


def options(parser: argparse.ArgumentParser) -> None:
    """Options that the help does not show."""
    quiet = argparse.SUPPRESS
    parser.add_argument("--fail", choices=("raise", "kill", "stop", "pause", "replan"), help=quiet)
    parser.add_argument("--fail-rank", type=int, default=1, help=quiet)
    parser.add_argument("--fail-at", type=int, default=5, help=quiet)
    # How many of the step's collectives the rank still takes part in.
    parser.add_argument("--fail-after", type=int, default=0, help=quiet)


def misbehaving(
    options: argparse.Namespace, rank: int, number: int
) -> contextlib.AbstractContextManager[Any]:
    """What a step runs in."""
    if (rank, number) != (options.fail_rank, options.fail_at):
        return contextlib.nullcontext()
    ends = {
        "raise": _raise,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "pause": _pause,
    }
    if options.fail not in ends:
        return contextlib.nullcontext()
    if options.fail_after:
        return _Later(options.fail_after, ends[options.fail])
    ends[options.fail]()
    return contextlib.nullcontext()


def _raise() -> None:
    raise ValueError("asked to fail")


def _pause() -> None:
    """Until somebody who has seen that it does says to go on."""
    print("paused", flush=True)
    sys.stdin.readline()


class _Later(TorchDispatchMode):
    """Sees every operation, and ends where a collective would begin that is one too many."""

    def __init__(self, count: int, end: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.end = count, end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.__name__:
            if self.left == 0:
                self.end()
            self.left -= 1
        return func(*args, **(kwargs or {}))
