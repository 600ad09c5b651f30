"""What each line of generated code is for: the tags of its node, kept without the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.records import Record

__all__ = ["Label", "label_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """Of one operation; the tags are those of program.py's table, empty where there is none."""

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
    meta = node.meta
    target = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    scope, phase, source, stage, peers = (
        str(meta.get(key) or "") for key in ("scope", "phase", "source", "stage", "peers")
    )
    return Label(target, source, scope, phase, meta.get("collective"), stage, peers)


