"""Frames: the entries of scopes, and calls of transforms and torch's checkpoint, that a node is in.

A loop may enter a scope of one name many times; each entry is a separate frame. Frames are compared by
identity, so that entries remain distinct wherever a node is copied to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Frame", "in_iteration", "path_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Frame:
    """One entry of a scope, or one call.

    Attributes:
        name: the scope's name; empty for a call.
        module: whether the name is the path of a module, which includes those of enclosing modules.
        root: whether a function made of a module is called; paths of modules in it begin at this name.
        policy: the policy of a checkpoint that begins here, if one does.
        iterated: whether each iteration of a loop enters it; ``*`` in the name is its number.
        each: the frames of the layers that became a loop, by row; see `in_iteration` for the name.
    """

    name: str = ""
    module: bool = False
    policy: Any = None
    iterated: bool = False
    each: tuple[Frame, ...] = ()
    root: bool = False


_NONE = Frame()


def path_of(frames: Sequence[Frame]) -> str:
    """``"block/3"``: the names of the scopes among them, outermost first."""
    names: list[str] = []
    start, last, before = "", _NONE, _NONE
    for frame in frames:
        # Between a module and a function that it holds there may be the call of a transform.
        if frame.module and (last if frame.root else before).module:
            names.pop()
        if frame.name:
            names.append(start + frame.name if frame.module else frame.name)
            last = frame
        before = frame
        if frame.root:
            start = f"{start}{frame.name}." if frame.name else ""
    return "/".join(names)


def in_iteration(path: str, row: int) -> str:
    """The path of one iteration of a loop, from that of all.

    >>> from torchard.functional.core.scope_frames import in_iteration
    >>> in_iteration("block/*", 3), in_iteration("layers.{1+2i}", 3), in_iteration("h.{2|3|5}", 2)
    ('block/3', 'layers.7', 'h.5')
    """

    def number(found: re.Match[str]) -> str:
        first, step, listed = found.groups()
        if listed is not None:
            return str(listed.split("|")[row])
        return str(int(first or 0) + row * int(f"{step}1" if step in ("+", "-") else step or 1))

    return _NUMBER.sub(number, path)


_NUMBER = re.compile(r"\*|\{(\d+)([+-]\d*)i\}|\{([^{}]*\|[^{}]*)\}")
