"""The collectives that really run, counted where torch dispatches them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counter"]


class Counter(TorchDispatchMode):
    """Counts the collectives that reach the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in func.__name__:
            name = func._schema.name.split("::")[1].rstrip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
