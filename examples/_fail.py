"""Failures of one rank of a job, for tests of the errors on the others."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import _job

from torchard.functional.torch_internals import TorchDispatchMode

__all__ = ["misbehaving", "options"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options, which the help does not show."""
    quiet = argparse.SUPPRESS
    parser.add_argument("--fail", choices=("raise", "kill", "stop", "pause", "replan"), help=quiet)
    parser.add_argument("--fail-rank", type=int, default=1, help=quiet)
    parser.add_argument("--fail-at", type=int, default=5, help=quiet)
    # Only in the first attempts; torchrun --max-restarts starts more of them.
    parser.add_argument("--fail-attempts", type=int, default=1, help=quiet)
    # The number of collectives of the step in which the rank still takes part.
    parser.add_argument("--fail-after", type=int, default=0, help=quiet)


def misbehaving(
    options: argparse.Namespace, rank: int, number: int
) -> contextlib.AbstractContextManager[Any]:
    """A context for a step: the rank fails at its start, or inside it, if the options say so."""
    here = (rank, number) == (options.fail_rank, options.fail_at)
    if not here or _job.attempt() >= options.fail_attempts:
        return contextlib.nullcontext()
    failures = {
        "raise": _raise,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "pause": _pause,
    }
    if options.fail not in failures:
        return contextlib.nullcontext()
    if options.fail_after:
        return _AfterCollectives(options.fail_after, failures[options.fail])
    failures[options.fail]()
    return contextlib.nullcontext()


def _raise() -> None:
    raise ValueError("asked to fail")


def _pause() -> None:
    """Print "paused", and wait for a line on stdin."""
    print("paused", flush=True)
    sys.stdin.readline()


class _AfterCollectives(TorchDispatchMode):
    """A mode that fails in place of the first collective after the given number of them."""

    def __init__(self, count: int, fail: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.fail = count, fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.__name__:
            if self.left == 0:
                self.fail()
            self.left -= 1
        return func(*args, **(kwargs or {}))
