"""What is said where a version of torch lacks a private name: at import, and before anything has run.

A name that is used inside a function is asked for at import all the same, by `require`. One whose import
takes seconds is asked for where it is used, in `needed()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["NEWEST", "OLDEST", "RANGE", "needed", "require"]

# Those that `make matrix` runs the tests on.
OLDEST, NEWEST = (2, 11), (2, 15)
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def require(owner: Any, *names: str) -> None:
    """Raise unless a module, class or object of torch's has these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {', '.join(missing)}")


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Private names of torch's are looked up inside: one that is not there is an error that says so."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torchard needs torch {RANGE}; {torch.__version__} lacks an internal it uses "
            f"({error}). Install one of those versions."
        ) from error
