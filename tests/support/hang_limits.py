"""pytest's `timeout`, as a limit for tests that hang: they compute without end, or compute nothing.

A plugin that gives pytest-timeout another clock (progress.py); what it does at the end stays.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import pytest_timeout
from progress import Own, Watch

# How often within its limit a test is looked at.
LOOKS = 5


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Look after a test now and then, with the processes that it starts."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # the usual way
    watch = Watch(settings.timeout, Own())

    def look(*_: object) -> None:
        __tracebackhide__ = True
        if said := watch.hangs():
            print(f"\n{item.nodeid} {said}")
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, *[settings.timeout / LOOKS] * 2)
    return True
