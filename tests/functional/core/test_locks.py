"""Locks: held by one thread at a time, also while it asks whether it holds them."""

from __future__ import annotations

import copy
import os
import pickle
import threading

from torchard.functional.core.locks import Lock


def test_asking_does_not_release() -> None:
    """Another thread that waits for the lock does not get it when the owner asks."""
    lock, inside, waiting, other = Lock(), [], threading.Event(), []

    def wait() -> None:
        waiting.set()
        with lock:
            other.append(list(inside))

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(60)
        for _ in range(20_000):
            assert lock.is_held()
        inside.append("done")
    thread.join(60)
    assert other == [["done"]]
    assert not lock.is_held()


def test_only_the_owner_holds_it() -> None:
    lock, found = Lock(), []
    with lock, lock:
        thread = threading.Thread(target=lambda: found.append(lock.is_held()))
        thread.start()
        thread.join(60)
        assert lock.is_held() and found == [False]
    assert not lock.is_held()


def test_copies_are_free() -> None:
    lock = Lock()
    with lock:
        assert not copy.deepcopy(lock).is_held()
        assert not pickle.loads(pickle.dumps(lock)).is_held()


def test_a_fork_keeps_what_the_forking_thread_holds() -> None:
    lock = Lock()
    with lock, lock:
        child = os.fork()
        if not child:
            try:
                right = lock.is_held()
                lock.__exit__()
                lock.__exit__()
                right = right and not lock.is_held()
            finally:
                os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert lock.is_held()


def test_a_fork_releases_what_other_threads_hold() -> None:
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if not child:
        with lock:
            os._exit(0 if lock.is_held() else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join(60)
    assert status == 0
