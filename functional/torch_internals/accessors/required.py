"""Errors for versions of torch that lack a private name, raised at import.

Names that are used inside functions are checked at import too, by `require`. Those whose import takes
seconds are checked where they are used, in `needed()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["NEWEST", "OLDEST", "RANGE", "needed", "require"]

# The versions that `make matrix` tests.
OLDEST, NEWEST = (2, 11), (2, 15)
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)


def require(owner: Any, *names: str) -> None:
    """Raise AttributeError unless a module, class or object of torch has these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {', '.join(missing)}")


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """A context for lookups of private names of torch: a missing one raises an ImportError."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torchard needs torch {RANGE}; torch {torch.__version__} lacks an internal that it uses "
            f"({error}). Install a version in that range."
        ) from error
