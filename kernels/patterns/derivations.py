"""What is derived of the library's patterns, on disk: their terms, and which gradients they have.

Deriving all of it takes seconds, and depends on nothing but the code of torch and torchard. So it is
kept in ``$TORCHARD_CACHE_DIR``, else in the user's folder of caches, in a file for each version of both.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchard.functional.torch_internals.operators import aten

__all__ = ["DERIVATIONS", "Derivations"]

V = TypeVar("V")
# The number of versions kept.
_KEPT = 8
_LOG = logging.getLogger("torchard.fuse")
_OPERATOR = type(aten.add.Tensor)


def _operator(name: str) -> Any:
    """An operator of torch by its name, ``aten.add.Tensor``."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


class _Pickler(pickle.Pickler):
    """A pickler that knows torch's operators."""

    def reducer_override(self, value: Any) -> Any:
        return (_operator, (str(value),)) if isinstance(value, _OPERATOR) else NotImplemented


class Derivations:
    """Derived values by key, read from a file when the first one is needed.

    Args:
        folder: where the file is; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._fresh = False
        self._lock = threading.Lock()

    @cached_property
    def _path(self) -> Path | None:
        return None if self.folder is None else self.folder / f"patterns-{_version()}.pickle"

    @cached_property
    def _known(self) -> dict[str, bytes]:
        """By key, the values as they are on disk, each by itself."""
        try:
            known = pickle.loads(self._path.read_bytes()) if self._path else {}
        except FileNotFoundError:
            return {}
        except Exception as error:  # a file that was cut short raises anything
            _LOG.warning("%s cannot be read (%s); it is derived again", self._path, error)
            return {}
        return known if isinstance(known, dict) else {}

    def get(self, key: str | None, make: Callable[[], V]) -> V:
        """The value of a key, derived if it is not known; always derived without a key."""
        if key is None or self.folder is None:
            return make()
        with self._lock:
            kept = self._known.get(key)
        if kept is not None:
            try:
                value: V = pickle.loads(kept)
                return value
            except Exception as error:  # bytes that are not what was written raise anything
                _LOG.warning("%s of %s: %s; it is derived again", key, self._path, error)
        value = make()
        memory = io.BytesIO()
        _Pickler(memory).dump(value)
        with self._lock:
            self._known[key], self._fresh = memory.getvalue(), True
        return value

    def save(self) -> None:
        """Write what has been derived since the last time; another process never reads a part of it."""
        if not self._fresh or self._path is None:
            return
        with self._lock:
            self._fresh, content = False, pickle.dumps(self._known)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(content)
            Path(file.name).replace(self._path)
            for old in sorted(self._path.parent.glob("patterns-*"), key=_age)[_KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:  # a disk that is full or read-only
            _LOG.info("what was derived of patterns is not kept: %s", error)


def _age(path: Path) -> float:
    return -path.stat().st_mtime if path.exists() else 0.0


def _version() -> str:
    """Equal for equal code of torchard, on an equal version of torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    root = Path(__file__).parents[2]
    for path in sorted((*root.glob("kernels/**/*.py"), *root.glob("functional/**/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path | None:
    """The folder; None if the variable is empty."""
    named = os.environ.get("TORCHARD_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(caches).expanduser() / "torchard"
    except RuntimeError:  # a user without a home
        return None


DERIVATIONS = Derivations(_folder())
