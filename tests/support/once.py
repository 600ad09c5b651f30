"""What is made once for all test workers: the first one that asks makes it, the others read it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

__all__ = ["once"]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """The JSON that ``make`` gives, of a folder of its own; who makes it has a limit, who waits none."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers' common one
    found = folder / f"{name}.json"
    with FileLock(f"{found}.lock"):
        if not found.exists():
            own = folder / name
            own.mkdir()
            found.write_text(json.dumps(make(own)))
    return json.loads(found.read_text())
