"""Segments: the parts of a function whose values a checkpoint decides on.

A segment is one entry of a scope, one call of a checkpointed function, or all of a program. Its nodes,
those of its backward among them, carry it as a tag until everything else has been done to the program;
what becomes of its values is decided then (rematerialise.py), so that a policy sees collectives and fused
kernels whichever way the transforms were stacked.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import FRAMES, SEGMENTS
from torchard.functional.remat.policies import Policy

__all__ = ["ScopePattern", "Segment", "Where", "mark", "scopes_in", "segments_of", "segments_opened"]

ScopePattern = str | Callable[[str], Any]
Where = ScopePattern | Sequence[ScopePattern]


@dataclass(frozen=True)
class Segment:
    """What decides, and the frames in which it does."""

    policy: Policy
    frames: tuple[Frame, ...] = ()

    def inside(self, frames: tuple[Frame, ...]) -> Segment:
        """The same segment of a program that runs in these frames."""
        return replace(self, frames=(*frames, *self.frames))

    def __str__(self) -> str:
        return path_of(self.frames) or "the function"


def segments_of(node: fx.Node) -> tuple[Segment, ...]:
    """The segments a node is in, outermost first."""
    found: tuple[Segment, ...] = SEGMENTS.get(node, ())
    return found


def segments_opened(frames: tuple[Frame, ...]) -> tuple[Segment, ...]:
    """The segments that begin at these frames, outermost first."""
    return tuple(
        Segment(frame.policy, frames[:i])
        for i, frame in enumerate(frames, 1)
        if frame.policy is not None
    )


def mark(program: Program, policy: Policy, where: Sequence[ScopePattern] | None) -> Program:
    """The program with its nodes in a segment more: one for each scope that is meant, or one in all."""
    program = program.copy()
    meant = None if where is None else chooser(where)
    for node in program.calls:
        frames = _entry(node, meant)
        if frames is not None:
            mine, outer = Segment(policy, frames), segments_of(node)
            # It is around those that begin in it, and inside of the calls it is in itself.
            at = sum(len(other.frames) < len(frames) for other in outer)
            SEGMENTS.set(node, (*outer[:at], mine, *outer[at:]))
    return program


def chooser(patterns: Sequence[ScopePattern]) -> Callable[[str], bool]:
    """A test of a scope's path: whether any of these means it."""

    def meant(path: str) -> bool:
        return any(
            bool(p(path)) if callable(p) else fnmatch.fnmatchcase(path, p) for p in patterns
        )

    return meant


def _entry(node: fx.Node, meant: Callable[[str], Any] | None) -> tuple[Frame, ...] | None:
    """The frames of the outermost scope around a node that is meant."""
    if meant is None:
        return ()
    frames: tuple[Frame, ...] = FRAMES.get(node, ())
    for i, frame in enumerate(frames, 1):
        if frame.name and meant(path_of(frames[:i])):
            return frames[:i]
    return None


def scopes_in(program: Program) -> list[str]:
    """Every scope of a program, in order."""
    found: dict[str, None] = {}
    for node in program.calls:
        frames = FRAMES.get(node, ())
        for i, frame in enumerate(frames, 1):
            if frame.name:
                found[path_of(frames[:i])] = None
    return list(found)
