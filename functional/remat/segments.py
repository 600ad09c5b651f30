"""Segments: the parts of a function to whose values a checkpoint's policy applies.

A segment is one entry of a scope, one call of a checkpointed function, or a whole program. Its nodes,
those of its backward included, carry it as a tag until every other rewrite has run. Only then are its
policies applied (rematerialise.py), so that they see collectives and fused kernels in every order of the
transforms.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import fx

from torchard.functional.core.scope_frames import Frame, in_iteration, path_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import PerIteration
from torchard.functional.programs.tags import FRAMES, SEGMENTS
from torchard.functional.remat.policy import Policy

__all__ = [
    "ScopePattern",
    "Segment",
    "Where",
    "Why",
    "chooser",
    "enclose",
    "mark",
    "scopes_in",
    "segments_of",
    "segments_opened",
    "shared_segments",
    "why_kept",
]

ScopePattern = str | Callable[[str], Any]
Where = ScopePattern | Sequence[ScopePattern]


@dataclass(frozen=True)
class Segment:
    """A policy, and the frames that the segment is in."""

    policy: Policy
    frames: tuple[Frame, ...] = ()

    def inside(self, frames: tuple[Frame, ...]) -> Segment:
        """The same segment, of a program that runs inside these frames."""
        return replace(self, frames=(*frames, *self.frames))

    def __str__(self) -> str:
        return path_of(self.frames) or "the function"


@dataclass(frozen=True)
class Why(PerIteration):
    """Why a backward reads a value, and the path of the segment that the value enters or leaves."""

    text: str
    segment: str = ""

    def __str__(self) -> str:
        return self.text + self.segment

    def in_iteration(self, i: int) -> Why:
        """Why it reads one iteration's value."""
        return replace(self, segment=in_iteration(self.segment, i))


def why_kept(own: Sequence[Segment], reader: Sequence[Segment]) -> Why:
    """Why an operation of the backward reads a value that the forward computed.

    Args:
        own: the segments of the value.
        reader: the segments of the operation.
    """
    if shared := shared_segments(own, reader):
        return Why(f"{own[shared - 1].policy} keeps it")
    if own:
        return Why("output of ", str(own[0]))
    return Why("input of ", str(reader[0])) if reader else Why("not in a checkpoint")


def shared_segments(one: Sequence[Segment], other: Sequence[Segment]) -> int:
    """How many of the outermost segments are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def segments_of(node: fx.Node) -> tuple[Segment, ...]:
    """The segments a node is in, outermost first."""
    segments: tuple[Segment, ...] = SEGMENTS.get(node, ())
    return segments


def segments_opened(frames: tuple[Frame, ...]) -> tuple[Segment, ...]:
    """The segments that begin at these frames, outermost first."""
    return tuple(
        Segment(frame.policy, frames[:i])
        for i, frame in enumerate(frames, 1)
        if frame.policy is not None
    )


def mark(
    program: Program,
    policy: Policy,
    where: Sequence[ScopePattern] | None,
    outer: tuple[Frame, ...] = (),
) -> Program:
    """The program with new segments: one per scope that the patterns select, or one in all if None.

    Args:
        outer: frames that the program runs in; those that are selected are segments already.
    """
    program = program.copy()
    selected = None if where is None else chooser(where)
    for node in program.calls:
        frames = _entry(node, selected, outer)
        if frames is not None:
            mine, others = Segment(policy, frames), segments_of(node)
            # Inside of segments with fewer frames, around the others.
            at = sum(len(other.frames) < len(frames) for other in others)
            SEGMENTS.set(node, (*others[:at], mine, *others[at:]))
    return program


def enclose(nodes: Iterable[fx.Node], policy: Policy) -> None:
    """Make nodes a segment around those that they are in already, in place."""
    segment = Segment(policy)
    for node in nodes:
        SEGMENTS.set(node, (segment, *segments_of(node)))


def chooser(patterns: Sequence[ScopePattern]) -> Callable[[str], bool]:
    """A predicate on the path of a scope: whether any of these patterns selects it."""

    def selected(path: str) -> bool:
        return any(
            bool(p(path)) if callable(p) else fnmatch.fnmatchcase(path, p) for p in patterns
        )

    return selected


def _entry(
    node: fx.Node, selected: Callable[[str], Any] | None, outer: tuple[Frame, ...]
) -> tuple[Frame, ...] | None:
    """The frames of the outermost selected scope around a node, if it is inside of ``outer``."""
    if selected is None:
        return ()
    frames: tuple[Frame, ...] = (*outer, *FRAMES.get(node, ()))
    for i, frame in enumerate(frames, 1):
        if frame.name and selected(path_of(frames[:i])):
            return frames[len(outer) : i] if i > len(outer) else None
    return None


def scopes_in(program: Program) -> list[str]:
    """The paths of all scopes of a program, in order."""
    paths: dict[str, None] = {}
    for node in program.calls:
        frames = FRAMES.get(node, ())
        for i, frame in enumerate(frames, 1):
            if frame.name:
                paths[path_of(frames[:i])] = None
    return list(paths)
