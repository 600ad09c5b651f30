"""Threads are gloo's by their names alone; names may be anything, and numbers another namespace's."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchard.functional import torch_internals as internals

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


@contextmanager
def threads(*names: bytes) -> Iterator[list[int]]:
    """Threads with these names, by their numbers."""
    end, numbers, begun = threading.Event(), dict[bytes, int](), threading.Barrier(len(names) + 1)

    def run(name: bytes) -> None:
        numbers[name] = threading.get_native_id()
        Path(f"/proc/self/task/{numbers[name]}/comm").write_bytes(name)
        begun.wait()
        end.wait()

    for name in names:
        threading.Thread(target=run, args=(name,)).start()
    begun.wait()
    try:
        yield [numbers[name] for name in names]
    finally:
        end.set()


def policies(numbers: list[int]) -> list[int]:
    return [os.sched_getscheduler(number) for number in numbers]


def test_names_in_no_encoding() -> None:
    with threads(b"gr\xfc\xdfe", b"gloo_tcp_loop") as numbers:
        internals.let_gloo_wait()
        assert policies(numbers) == [os.SCHED_OTHER, os.SCHED_BATCH]


def test_a_policy_of_its_own_is_kept() -> None:
    with threads(b"gloo_tcp_loop") as numbers:
        os.sched_setscheduler(numbers[0], os.SCHED_IDLE, os.sched_param(0))
        internals.let_gloo_wait()
        assert policies(numbers) == [os.SCHED_IDLE]


def test_numbers_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be those of other processes here."""
    monkeypatch.setattr(os, "readlink", lambda _: f"{os.getpid() + 1}")
    with threads(b"gloo_tcp_loop") as numbers:
        internals.let_gloo_wait()
        assert policies(numbers) == [os.SCHED_OTHER]


@pytest.mark.parametrize("refused", ["readlink", "listdir", "sched_getscheduler", "sched_setscheduler"])
def test_where_nothing_is_allowed_nothing_is_done(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(refused)

    with threads(b"gloo_tcp_loop") as numbers:
        with monkeypatch.context() as patched:
            patched.setattr(os, refused, refuse)
            internals.let_gloo_wait()
        assert policies(numbers) == [os.SCHED_OTHER]
