"""The changes between two traces, in the user's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ReadRecord", "change_between"]


@dataclass(frozen=True)
class ReadRecord:
    """What a walk read: the number of an object, what of it, and the token of what was there.

    Attributes:
        entries: the entries, in order.
        unguardable: the numbers of objects that cannot be compared.
    """

    entries: Sequence[tuple[int, str, Any]]
    unguardable: Sequence[int]

    def path(self, owner: int, label: str = "") -> str:
        """The path to something that was read: ``the closure variable config.scale``."""
        origins = {n: (of, at) for of, at, n in reversed(self.entries) if isinstance(n, int)}
        while owner >= 0 and not label.startswith("the "):
            owner, at = origins[owner]
            label = at + label
        if not label.startswith("the "):
            return f"the attribute {label.removeprefix('.')}" if label else "the function"
        return label

    def cannot_be_compared(self) -> str | None:
        """The path to the first object that cannot be compared."""
        return self.path(self.unguardable[0]) if self.unguardable else None


def change_between(before: ReadRecord, after: ReadRecord) -> str | None:
    """The first object that was read and has changed; None if there is none."""
    for old, new in zip(before.entries, after.entries, strict=False):
        if old != new:
            return _change(before, after, old, new)
    if len(before.entries) != len(after.entries):
        longer = max(before, after, key=lambda reads: len(reads.entries))
        owner, label, _ = longer.entries[min(len(before.entries), len(after.entries))]
        return longer.path(owner, label)
    return None


def _change(before: ReadRecord, after: ReadRecord, old: Any, new: Any) -> str:
    if old[:2] == new[:2]:
        return after.path(*new[:2]) + _values(old[2], new[2])
    longer, entry = (after, new) if new[0] <= old[0] else (before, old)
    return longer.path(*entry[:2])


def _values(old: Any, new: Any) -> str:
    """Settings with their values; for other objects, that the object was replaced."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        return f" (from {_short(old[1])} to {_short(new[1])})"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
