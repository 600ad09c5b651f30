"""The text of a RetraceWarning: what kept changing between the last traces of a function."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.engine.cache_entry import CacheEntry
from torchard.functional.guards.changes import ReadRecord, change_between

__all__ = ["TraceRecord", "retraced"]


@dataclass(frozen=True)
class TraceRecord:
    """One trace of a function.

    Attributes:
        key: of its arguments and of torch's settings.
        paths: of its arguments' leaves.
        reads: what it read besides its arguments.
        lost: whether it uses a tensor that cannot be found again, so that it was used once.
    """

    key: Any
    paths: list[str]
    reads: ReadRecord
    lost: bool

    @staticmethod
    def of(entry: CacheEntry, key: Hashable, paths: list[str]) -> TraceRecord:
        """The record of an entry that was just traced."""
        lost = any(closure.reader is None for closure in entry.lifted)
        return TraceRecord(key, paths, entry.environment.take_reads(), lost)


def retraced(name: str, history: Sequence[TraceRecord]) -> str:
    """The text of a RetraceWarning."""
    reason = _state(history) or _argument(history) or _OTHER
    return f"{name} was traced {len(history)} times: {reason}"


_OTHER = (
    "its argument trees or torch's settings (autocast, default dtype) differ. Call it with arguments of "
    "one structure, under the same settings."
)


def _state(history: Sequence[TraceRecord]) -> str | None:
    """What a function reads changed, if most of the traces had arguments that had been traced before."""
    last: dict[Any, TraceRecord] = {}
    changes: list[str] = []
    again = 0
    for trace in history:
        before = last.get(trace.key)
        last[trace.key] = trace
        if before is not None:
            again += 1
            changes.append(_change(before, trace))
    if again < len(last):
        return None
    return max(changes, key=changes.count)


def _change(before: TraceRecord, after: TraceRecord) -> str:
    held = after.reads.cannot_be_compared()
    if held is not None:
        return (
            f"{held} is an iterator, an array of objects or more objects than are compared, so that "
            "each call is a new trace. Read the values before the call, and pass them as arguments."
        )
    change = change_between(before.reads, after.reads)
    if change is not None:
        return (
            f"{change} changed between calls, and a trace is valid for one state of what the function "
            "reads. Pass the changing value as an argument: a float or a tensor."
        )
    if after.lost:
        return (
            "it uses a tensor that is created anew for each call, or whose place outside of the "
            "function is unknown. Pass the tensor as an argument."
        )
    return "it has more signatures than its cache_size. Pass changing numbers as floats or tensors."


def _argument(history: Sequence[TraceRecord]) -> str | None:
    """The leaf that took the most values."""
    paths = history[-1].paths
    alike = [trace.key for trace in history if trace.paths == paths]
    changes = []
    for i, path in enumerate(paths):
        values = list(dict.fromkeys(_leaf_text(key[i + 1]) for key in alike))
        changes.append((len(values), path, values))
    count, path, values = max(changes, key=lambda change: change[0], default=(0, "", []))
    if count < 2:
        return None
    return (
        f"{path} took {count} different values ({', '.join(values[:4])}...), and each is a new "
        "trace. Pass a changing number as a float or a tensor, and pad changing shapes."
    )


def _leaf_text(part: Any) -> str:
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type):
        return repr(part[1])
    if isinstance(part, tuple) and len(part) == 2:  # of a plain tensor: its facts, and its strides
        part = part[0]
    if isinstance(part, tuple) and isinstance(part[0], torch.Size):
        return f"{part[1]}{list(part[0])}".removeprefix("torch.")
    if isinstance(part, tuple) and part[0] is slice:
        return str(slice(*part[1:]))
    return str(part)
