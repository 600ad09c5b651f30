"""Labels of lines of generated code: the tags of their nodes, without the graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import (
    COLLECTIVE,
    COORDINATES,
    PEERS,
    PHASE,
    SCOPE,
    SOURCE,
    STAGE,
    TASK,
)

__all__ = ["Label", "label_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """The tags (tags.py) of one operation, empty where there are none."""

    op: str
    source: str
    scope: str
    phase: str
    task: str
    collective: Record | None
    stage: str
    peers: str
    coordinates: str

    @property
    def place(self) -> str:
        """The scope and phase, ``"block/0 backward"``; only the phase outside of scopes."""
        return f"{self.scope} {self.phase}".strip()

    def in_iteration(self, i: int | None) -> Label:
        """The label in one iteration of a loop, whose number is in the scope."""
        return self if i is None else replace(self, scope=in_iteration(self.scope, i))


def label_of(node: fx.Node) -> Label:
    """The label of a node."""
    target = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    source, scope, phase, task, stage, peers, at = (
        str(tag.get(node) or "") for tag in (SOURCE, SCOPE, PHASE, TASK, STAGE, PEERS, COORDINATES)
    )
    return Label(target, source, scope, phase, task, COLLECTIVE.get(node), stage, peers, at)


