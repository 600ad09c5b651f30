"""Implementations that require an optional package, imported when they are first needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Backend", "Imported", "implementation", "triton"]


@dataclass(frozen=True)
class Imported:
    """A function that is given by name and imported on demand.

    Attributes:
        package: the package that its module requires, which reports name.
        module, name: the function's module and name.
    """

    package: str
    module: str
    name: str

    def load(self) -> Callable[..., Any] | None:
        """The function; None where its package is not installed."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != self.package:
                raise
            return None
        function: Callable[..., Any] = getattr(module, self.name)
        return function


def triton(module: str, name: str) -> Imported:
    """One of torchard's Triton functions."""
    return Imported("triton", f"torchard.kernels.triton.{module}", name)


@dataclass(frozen=True)
class Backend:
    """The implementation of a kernel on a device; None if the reference is compiled.

    Attributes:
        name: the name in reports.
        note: the note in reports about a missing package.
        imported: whether it was imported on demand, so that the reference can replace it.
    """

    run: Callable[..., Any] | None
    name: str = ""
    note: str = ""
    imported: bool = False


def implementation(
    implementations: Mapping[str, Callable[..., Any] | Imported], device: str
) -> Backend:
    """The implementation for a device type, else for any device, whose package is installed."""
    note = ""
    for place in (device, "any"):
        entry = implementations.get(place)
        if isinstance(entry, Imported):
            run = entry.load()
            if run is not None:
                return Backend(run, entry.package, note, imported=True)
            note = f" (no {entry.package})"
        elif entry is not None:
            return Backend(entry, device if place == device else "kernel", note)
    return Backend(None, note=note)
