"""A warning for versions of torch outside of the tested range, which is that of `pyproject.toml`."""

from __future__ import annotations

import re
import warnings

from torchard.functional.core.errors import TorchVersionWarning
from torchard.functional.torch_internals.accessors.required import NEWEST, OLDEST, RANGE

__all__ = ["check"]


def check(version: str) -> None:
    """Warn, once per process, if this version of torch lies outside of the tested range."""
    release = re.match(r"(\d+)\.(\d+)", version)
    numbers = tuple(map(int, release.groups())) if release else NEWEST
    if not OLDEST <= numbers <= NEWEST:
        warnings.warn(
            f"torchard is tested with torch {RANGE}, and this is torch {version}: it may fail where "
            "torch's internals have changed. Install a version in that range.",
            TorchVersionWarning,
            stacklevel=2,
        )
