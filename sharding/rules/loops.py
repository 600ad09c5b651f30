"""Rules of what enters the iterations of a loop and leaves them (functional/programs/loops.py).

One iteration is planned for all. The layers of stacked parameters are never split: rows are taken by each
rank of its own shard of every layer.
"""

from __future__ import annotations

from torchard.functional.programs.markers import (
    again,
    enter,
    item,
    leave,
    listed,
    row,
    rows,
    total,
)
from torchard.sharding.rules.registry import Call, register_rule

__all__: list[str] = []

register_rule(enter, leave, total, text="... -> ... | linear 0")
register_rule(again, text="..., ... -> ... | linear 0 1")
register_rule(row, item, text="layers ... -> ... | whole layers | linear 0")
register_rule(rows, text="... -> layers ... | whole layers | linear 0")


def _listed(call: Call) -> str:
    # Not linear: sums are completed before, one by one, as their terms are computed.
    return f"{', '.join(['...'] * len(call.ins))} -> layers ... | whole layers"


register_rule(listed, text=_listed)
