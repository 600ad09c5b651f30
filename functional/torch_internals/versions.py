"""The versions of torch that torchard is tested with; `make matrix` runs the tests on them.

`pyproject.toml` asks for the same range.
"""

from __future__ import annotations

import re
import warnings

from torchard.functional.core.errors import TorchVersionWarning

__all__ = ["NEWEST", "OLDEST", "RANGE", "check"]

OLDEST, NEWEST = (2, 11), (2, 15)
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def check(version: str) -> None:
    """Warn, once per process, if this version of torch lies outside of the tested range."""
    release = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(map(int, release.groups())) if release else NEWEST
    if not OLDEST <= numbers <= NEWEST:
        warnings.warn(
            f"torchard is tested with torch {RANGE}, and this is torch {version}: it may fail where "
            "torch's internals have changed",
            TorchVersionWarning,
            stacklevel=2,
        )
