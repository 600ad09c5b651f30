"""Implementations that need a package which may not be there, imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Backend", "Imported", "implementation", "triton"]


@dataclass(frozen=True)
class Imported:
    """A function by its name.

    Attributes:
        package: what its module needs, and what reports say runs.
        module, name: where it is.
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
        found: Callable[..., Any] = getattr(module, self.name)
        return found


def triton(module: str, name: str) -> Imported:
    """One of torchard's own."""
    return Imported("triton", f"torchard.kernels.triton.{module}", name)


@dataclass(frozen=True)
class Backend:
    """What runs a kernel on a device; None if it is to be compiled.

    Attributes:
        name: in reports. note: what they say of what is not here.
        imported: it is there for speed alone.
    """

    run: Callable[..., Any] | None
    name: str = ""
    note: str = ""
    imported: bool = False


def implementation(
    implementations: Mapping[str, Callable[..., Any] | Imported], device: str
) -> Backend:
    """The one for a type of device, or else the one for any, of those whose packages are here."""
    note = ""
    for place in (device, "any"):
        given = implementations.get(place)
        if isinstance(given, Imported):
            run = given.load()
            if run is not None:
                return Backend(run, given.package, note, imported=True)
            note = f" (no {given.package})"
        elif given is not None:
            return Backend(given, device if place == device else "kernel", note)
    return Backend(None, note=note)
