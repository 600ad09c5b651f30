"""The settings of torch that a function's operations depend on, and a context that restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchard.functional import torch_internals as internals

__all__ = ["Settings"]

_KINDS = ("cpu", "cuda")


class Settings(NamedTuple):
    """The settings of a thread.

    Attributes:
        dtype: the default dtype.
        device: the default device; None if none is set.
        autocast: the device types for which autocast is on, each with its dtype.
    """

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def current() -> Settings:
        """The current settings."""
        cast: tuple[tuple[str, torch.dtype], ...] = ()
        if internals.autocast_on():
            on = (kind for kind in _KINDS if torch.is_autocast_enabled(kind))
            cast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)
        return Settings(torch.get_default_dtype(), internals.default_device(), cast)

    def are_current(self) -> bool:
        """Whether these settings are current; takes half the time of `current`."""
        if self.autocast or internals.autocast_on():
            return self == Settings.current()
        dtype, device = torch.get_default_dtype(), internals.default_device()
        return self.dtype is dtype and self.device == device

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context with these settings: by default a backward has those of its caller or thread."""
        now = Settings.current()
        with contextlib.ExitStack() as stack:
            for kind in _KINDS if self.autocast != now.autocast else ():
                dtype = dict(self.autocast).get(kind)
                cast = torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False)
                stack.enter_context(cast)
            if self.device != now.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if self.dtype != now.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            yield
