"""Rules for values that enter and leave the iterations of a loop (functional/programs/loops.py); choices.

One iteration is planned for all. The layers of stacked parameters are never split: rows are taken by each
rank of its own shard of every layer.
"""

from __future__ import annotations

from collections.abc import Callable

from torchard.functional.programs.markers import (
    again,
    chosen,
    enter,
    goes_on,
    item,
    leave,
    listed,
    row,
    rows,
    total,
)
from torchard.sharding.rules.registry import Call, register_rule

__all__: list[str] = []

register_rule(enter, leave, goes_on, text="... -> ... | linear 0")
register_rule(again, text="..., ... -> ... | linear 0 1")
register_rule(row, item, text="layers ... -> ... | whole layers | linear 0")


def _collected(result: str) -> Callable[[Call], str]:
    """The rule of a value that is computed from the values of one loop, or of its halves."""

    def text(call: Call) -> str:
        given = range(len(call.ins))
        return f"{', '.join('...' for _ in given)} -> {result} | linear {' '.join(map(str, given))}"

    return text


register_rule(rows, text=_collected("layers ... | whole layers"))
register_rule(total, text=_collected("..."))


def _chosen(call: Call) -> str:
    # Every rank knows the whole index, so all of them choose alike: a sum of the values may be pending.
    values = range(1, len(call.ins))
    return f", {', '.join('...' for _ in values)} -> ... | linear {' '.join(map(str, values))}"


register_rule(chosen, text=_chosen)


def _listed(call: Call) -> str:
    # Not linear: sums are completed before, one by one, as their terms are computed.
    return f"{', '.join(['...'] * len(call.ins))} -> layers ... | whole layers"


register_rule(listed, text=_listed)
