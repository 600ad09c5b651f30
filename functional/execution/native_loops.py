"""Which loops can run in native code: those that do nothing but run one compiled region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Drop,
    For,
    Instruction,
    Pack,
    Put,
    Read,
    While,
)
from torchard.functional.iterations.native_loop import NativeLoop
from torchard.functional.iterations.workspace import Collected, LoopValue

__all__ = ["InNativeCode", "in_native_code"]


@dataclass(frozen=True)
class InNativeCode:
    """A loop in native code, and its slots.

    Attributes:
        results: what the loop sets: the carries, and lists of what is kept.
    """

    loop: NativeLoop
    sources: Sequence[str]
    carries: Sequence[str]
    collectors: Sequence[str]
    results: Sequence[str]


def in_native_code(loop: For | While) -> InNativeCode | None:
    """The loop in native code; None if its iterations do more than run one compiled region."""
    found = _Iteration()
    handed = [each for each in loop.body if isinstance(each, Assign)]
    for each in handed:
        found.values |= {slot: LoopValue("carry", c) for c, slot in enumerate(each.slots)}
    if len(handed) > 1 or not all(map(found.adds, loop.body)) or found.code_for is None:
        return None
    carries = list(handed[0].slots) if handed else []
    if isinstance(loop, While) and (found.has_rows or found.collected or loop.slot not in carries):
        return None
    order, going = (loop.order, 0) if isinstance(loop, For) else (None, carries.index(loop.slot))
    native = NativeLoop(
        found.code_for, found.operands, found.handed, list(found.collected.values()), order, going
    )
    lists = [slot for slot, each in found.collected.items() if each.kind == "list"]
    return InNativeCode(
        native, list(found.sources), carries, list(found.collected), [*carries, *lists]
    )


@dataclass
class _Iteration:
    """What the instructions of an iteration do, as far as they have been added."""

    values: dict[str, LoopValue] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    operands: list[LoopValue] = field(default_factory=list)
    collected: dict[str, Collected] = field(default_factory=dict)
    handed: list[LoopValue] = field(default_factory=list)
    code_for: Any = None
    results: str | None = None  # the slot of the region's results
    has_rows: bool = False

    def adds(self, instruction: Instruction) -> bool:
        """Add an instruction; whether native code can do it."""
        match instruction:
            case Read(_, slot, source, None, _):
                self.has_rows = True
                self.values[slot] = LoopValue("row", self._source(source))
            case Read(_, slot, source, int(index), "item") if source == self.results:
                self.values[slot] = LoopValue("result", index)
            case Pack(None, _, values, slots):
                self.operands = [self._value(slots[value]) for value in values]
            case Compute(node, slot, _, _, ()) if self.results is None:
                self.code_for, self.results = getattr(node.target, "code_for", None), slot
                return self.code_for is not None
            case Put(_, slot, str(source), listed, only) if not only and slot not in self.collected:
                kind: Any = "list" if listed else {"r": "rows", "t": "total"}[slot[0]]
                self.collected[slot] = Collected(kind, self._value(source))
            case Put(_, _, None, _, _) | Drop():
                pass
            case Assign(_, _, sources):
                self.handed = [self._value(source) for source in sources]
            case _:
                return False
        return True

    def _value(self, slot: str) -> LoopValue:
        """The value in a slot: if no instruction has set it, that which is there before the loop."""
        known = self.values.get(slot)
        return known if known is not None else LoopValue("whole", self._source(slot))

    def _source(self, slot: str) -> int:
        return self.sources.setdefault(slot, len(self.sources))
