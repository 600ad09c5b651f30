"""What is said when an operation of a program raises: where in the user's code it belongs.

A collective fails for reasons that lie with other processes, so it gets an error of its own. Everything
else is raised as it is, with a note.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchard.functional.core.errors import CollectiveError
from torchard.functional.programs.labels import Label
from torchard.functional.torch_internals.operators import COLLECTIVES

__all__ = ["compiled_failed", "failed"]

_REMEDY = (
    "A process that takes part has ended, hangs, or cannot be reached; what this call computed is lost. "
    "End all ranks, and start them again from the last checkpoint."
)
_DOING = {
    "meet": "this rank waited for the others to make the same call",
    "issue": "this rank began it",
    "wait": "this rank waited for its result",
}
# Of the collectives of a compiled program, how many a message lists.
_LISTED = 6


def failed(error: Exception, label: Label | None, name: str) -> None:
    """Say what raised: add a note to the error, or replace it where a collective did.

    Args:
        label: of the operation; None for an error outside of all.
        name: of the program.

    Raises:
        CollectiveError: the operation is one in which other processes take part.
    """
    if label is None:
        return
    where = [label.place and f"in {label.place}", label.source and f"for {label.source}"]
    if not label.stage:
        error.add_note(f"while {name} ran {', '.join([label.op, *filter(None, where)])}")
        return
    record = label.collective
    assert record is not None  # `stage` stands on the calls of collectives alone
    what = [record.title + (f" ({record.payload})" if record.payload else ""), *where[1:]]
    raise CollectiveError(
        f"{', '.join(filter(None, what))}: failed while {_DOING[label.stage]} in {name}: "
        f"{_first_line(error)}\n{label.peers} {_REMEDY}",
        record,
    ) from error


def compiled_failed(error: Exception, name: str, backend: str, records: Sequence[Any]) -> None:
    """The same for code that a compiler made, whose lines are not known to be anyone's.

    Which collective it was cannot be told; that it was one can, by the code that the error came through.
    """
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    call = next((line for line in reversed(lines) if COLLECTIVES in line), None)
    if call is None:
        error.add_note(f"while {name} ran, compiled by {backend}")
        return
    raise CollectiveError(
        f"a collective of {name} failed ({call.strip()}): {_first_line(error)}\n"
        f"The program is compiled by {backend}, so it can only be said to be one of these: "
        f"{_listed(records)}. {_REMEDY} jit(..., backend='eager') would name it.",
    ) from error


def _listed(records: Sequence[Any]) -> str:
    counts = Counter(record.title for record in records)
    shown = [f"{n} × {title}" if n > 1 else title for title, n in counts.items()]
    more = len(shown) - _LISTED
    return "; ".join(shown[:_LISTED] + ([f"and {more} more"] if more > 0 else [])) or "none"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
