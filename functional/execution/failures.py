"""Errors of a program's operations, with the user's source line.

A collective fails because of other processes, so it raises an error of its own. That of a check is
completed. Any other error is raised unchanged, with a note.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchard.functional.core.errors import CheckError, CollectiveError
from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.programs.labels import Label
from torchard.functional.torch_internals.operators import COLLECTIVES

__all__ = ["compiled_failed", "failed"]

_REMEDY = (
    "A process that takes part has ended, hangs, or cannot be reached; the results of this call are "
    "lost. Stop all ranks, and restart them from the last checkpoint."
)
_DOING = {
    "meet": "this rank waited for the others to make the same call",
    "issue": "this rank began it",
    "wait": "this rank waited for its result",
}
# A message lists at most this many collectives of a compiled program.
_LISTED = 6


def failed(error: Exception, label: Label | None, name: str, iteration: int | None = None) -> None:
    """Add a note to an operation's error, or raise a CollectiveError in its place.

    Args:
        label: the label of the operation; None for an error outside of all operations.
        name: the name of the program.
        iteration: the number of the iteration of its loop.

    Raises:
        CollectiveError: other processes take part in the operation.
    """
    if label is None:
        return
    label = label.in_iteration(iteration)
    if isinstance(error, CheckError):
        _complete(error, label, iteration)
        return
    where = [label.place and f"in {label.place}", label.source and f"for {label.source}"]
    if not label.stage:
        error.add_note(f"while {name} ran {', '.join([label.op, *filter(None, where)])}")
        return
    record = label.collective
    assert record is not None  # only calls of collectives have a stage
    what = [record.title + (f" ({record.payload})" if record.payload else ""), *where[1:]]
    raise CollectiveError(
        f"{', '.join(filter(None, what))}: failed while {_DOING[label.stage]} in {name}: "
        f"{_first_line(error)}\n{label.peers} {_REMEDY}",
        record,
    ) from error


def _complete(error: CheckError, label: Label, iteration: int | None) -> None:
    """Add to a check's error where it was raised, or in which iteration of a loop around that."""
    if not error.place:
        error.source, error.place = error.source or label.source, label.place
    elif iteration is not None:
        error.place = in_iteration(error.place, iteration)
    error.rank = error.rank or label.coordinates
    if not error.rank and dist.is_available() and dist.is_initialized():
        error.rank = f"rank {dist.get_rank()}"


def compiled_failed(error: Exception, name: str, backend: str, records: Sequence[Any]) -> None:
    """Like `failed`, for compiled code, whose lines do not correspond to operations.

    The traceback shows whether a collective failed, but not which collective.
    """
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    call = next((line for line in reversed(lines) if COLLECTIVES in line), None)
    if call is None:
        error.add_note(f"while {name} ran, compiled by {backend}")
        return
    raise CollectiveError(
        f"a collective of {name} failed ({call.strip()}): {_first_line(error)}\nThe program is "
        f"compiled by {backend}, so it is not known which one; it is one of: {_listed(records)}. "
        f"{_REMEDY} jit(..., backend='eager') names it.",
    ) from error


def _listed(records: Sequence[Any]) -> str:
    counts = Counter(record.title for record in records)
    shown = [f"{n} × {title}" if n > 1 else title for title, n in counts.items()]
    more = len(shown) - _LISTED
    return "; ".join(shown[:_LISTED] + ([f"and {more} more"] if more > 0 else [])) or "none"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
