"""What each line of generated code is for: the tags of its node, kept without the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import COLLECTIVE, PEERS, PHASE, SCOPE, SOURCE, STAGE

__all__ = ["Label", "label_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """Of one operation; the tags are those of tags.py, empty where there is none."""

    op: str
    source: str
    scope: str
    phase: str
    collective: Record | None
    stage: str
    peers: str

    @property
    def place(self) -> str:
        """``"block/0 backward"``; only the phase where nothing is labelled."""
        return f"{self.scope} {self.phase}".strip()


def label_of(node: fx.Node) -> Label:
    """The label of a node."""
    target = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    scope, phase, source, stage, peers = (
        str(tag.get(node) or "") for tag in (SCOPE, PHASE, SOURCE, STAGE, PEERS)
    )
    return Label(target, source, scope, phase, COLLECTIVE.get(node), stage, peers)


