"""Frames: where in a traced function a node was made. An entry of a scope, or a call of a transform
or of a checkpoint of torch's.

A scope has a name, which a loop may open many times; each entry is a frame of its own. Frames are
compared by identity, so that they tell one entry from the next wherever a node is copied to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Frame", "path_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Frame:
    """One entry.

    Attributes:
        name: of the scope; empty for a call.
        module: whether it is the path of a module, which has the names of the modules around it.
        policy: of a checkpoint that begins here, what its backward keeps.
    """

    name: str = ""
    module: bool = False
    policy: Any = None


def path_of(frames: Sequence[Frame]) -> str:
    """``"block/3"``: the names of the scopes among them, outermost first."""
    names: list[str] = []
    for i, frame in enumerate(frames):
        if frame.module and i and frames[i - 1].module:
            names.pop()
        if frame.name:
            names.append(frame.name)
    return "/".join(names)
